"""The supervision of the engine, with a small program in vLLM's place: real processes, real signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from langgraph_art_server.config import ServerSettings
from langgraph_art_server.errors import Unavailable
from langgraph_art_server.models import BaseModel
from langgraph_art_server.serving import managed
from langgraph_art_server.serving.engine import Engine
from langgraph_art_server.serving.families import Family
from langgraph_art_server.serving.managed import ManagedEngine
from langgraph_art_server.serving.vllm_command import VllmCommand

from .rooms import eventually

# Real processes are started and ended again and again.
pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "stub_engine.py"


class ProgramEngine(ManagedEngine):
    """The real supervision of another program."""

    arguments: list[str]
    starts = 0

    def _arguments(self, port: int) -> list[str]:
        self.starts += 1
        return [sys.executable, str(PROGRAM), "--port", str(port), *self.arguments]

    def children(self) -> list[psutil.Process]:
        """Every process of the engine: the guard and what it started."""
        if self._process is None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            guard = psutil.Process(self._process.pid)
            return [guard, *guard.children(recursive=True)]
        return []

    def program(self) -> psutil.Process:
        """The process in vLLM's place."""
        (found,) = [
            child for child in self.children() if "--port" in child.cmdline() and "--grace" not in child.cmdline()
        ]
        return found


@asynccontextmanager
async def engine(tmp_path: Path, *arguments: str, **settings: float) -> AsyncIterator[ProgramEngine]:
    model = BaseModel("tiny", tmp_path, {"model_type": "llama", "max_position_embeddings": 64})
    chosen = ServerSettings(**settings)  # type: ignore[arg-type]
    command = VllmCommand(chosen, model, Family(), "cpu")
    made = ProgramEngine(command, chosen, model, "cpu", tmp_path / "engine.log")
    made.arguments = list(arguments)
    made.start()
    try:
        yield made
    finally:
        await made.stop()


async def ready(made: Engine) -> None:
    async with asyncio.timeout(30):
        await made.wait_ready()


async def failed(made: Engine) -> str:
    """Its reason, once it has failed."""
    await eventually(lambda: made.state == "failed")
    with pytest.raises(Unavailable, match="the engine is failed"):
        await made.wait_ready()
    assert made.error is not None
    return made.error


def gone(processes: list[psutil.Process]) -> Callable[[], bool]:
    return lambda: not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


async def test_from_start_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ready after an answered request only; its environment; a proxy that is not for us; nothing left at the end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = f"http://127.0.0.1:{listener.getsockname()[1]}"
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, closed)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    secrets = {"VLLM_API_KEY": "k1", "LANGGRAPH_ART_SERVER_API_KEY": "k2", "LANGGRAPH_ART_URL": "u"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SOMETHING_ELSE", "kept")
    async with engine(tmp_path, "--refuse-first", "2", "--environment", str(tmp_path / "environment")) as made:
        assert made.state == "starting"
        with pytest.raises(Unavailable):
            _ = made.http
        await ready(made)
        answers = (await made.http.get("/requests")).json()
        assert [status for path, status in answers if path == "/v1/completions"] == [503, 503, 200]
        environment = json.loads((tmp_path / "environment").read_text())
        assert not set(secrets) & set(environment)
        assert environment["SOMETHING_ELSE"] == "kept"
        processes = made.children()
        assert len(processes) == 2
        (listening,) = [entry for entry in made.program().net_connections() if entry.status == psutil.CONN_LISTEN]
        assert listening.laddr.ip == "127.0.0.1"
        await made.stop()
        await eventually(gone(processes))
        assert made.state == "stopped"
        with pytest.raises(Unavailable, match="stopped"):
            await made.wait_ready()
        with pytest.raises(Unavailable):
            _ = made.http


async def test_a_crash_is_followed_by_a_restart_without_adapters(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    came_up: list[str] = []

    async def note() -> None:
        came_up.append(made.state)

    async with engine(tmp_path) as made:
        made.on_ready = note
        await ready(made)
        assert came_up == ["starting"], "before calls reach it"
        await made.load_adapter("desk@1", tmp_path)
        await made.load_adapter("desk@1", tmp_path)  # it is loaded already: as wished
        await made.unload_adapter("desk@1")
        await made.unload_adapter("desk@1")
        first, processes = made.http, made.children()
        os.kill(made.program().pid, signal.SIGKILL)
        await eventually(lambda: made.state == "starting")
        await ready(made)
        assert came_up == ["starting", "starting"]
        assert made.error is None
        assert made.starts == 2
        assert gone(processes)()
        assert first.is_closed
        await made.load_adapter("desk@1", tmp_path)


async def test_a_load_while_the_engine_is_away_is_unavailable(tmp_path: Path) -> None:
    async with engine(tmp_path) as made:
        await ready(made)
        program = made.program()
        program.kill()
        await eventually(gone([program]))
        with pytest.raises(Unavailable, match=r"load desk@1|not running"):
            await made.load_adapter("desk@1", tmp_path)


async def test_too_many_crashes_are_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managed, "MAX_RESTARTS", 1)
    async with engine(tmp_path) as made:
        await ready(made)
        os.kill(made.program().pid, signal.SIGSEGV)
        await eventually(lambda: made.state == "starting")
        await ready(made)
        os.kill(made.program().pid, signal.SIGKILL)
        reason = await failed(made)
        assert "exit code 137" in reason
        assert "for want of memory" in reason
        assert "--max-model-len" in reason
        assert made.starts == 2


async def test_good_service_wipes_out_earlier_crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managed, "MAX_RESTARTS", 1)
    monkeypatch.setattr(managed, "GOOD_SERVICE", 0.0)
    async with engine(tmp_path) as made:
        for _ in range(2):
            await ready(made)
            os.kill(made.program().pid, signal.SIGSEGV)
            await eventually(lambda: made.state != "ready")
        await ready(made)
        assert made.starts == 3


async def test_a_crash_at_the_start_is_a_failure_with_its_first_error(tmp_path: Path) -> None:
    (tmp_path / "engine.log").write_text("KeyError: of an earlier start\n")
    async with engine(tmp_path, "--die", "3") as made:
        reason = await failed(made)
        assert "exit code 3 while it started" in reason
        assert "First error: ValueError: the cause of it all\n" in reason
        assert "RuntimeError: Engine core initialization failed" in reason
        assert "KeyError" not in reason
        assert "memory" not in reason
        assert made.starts == 1, "what never served is not tried again"
        await eventually(lambda: gone(made.children())())


async def test_killed_at_the_start_hints_at_memory(tmp_path: Path) -> None:
    async with engine(tmp_path, "--die", "137") as made:
        assert "for want of memory" in await failed(made)


async def test_a_start_that_takes_too_long_is_a_failure(tmp_path: Path) -> None:
    async with engine(tmp_path, "--silent", start_timeout=0.6) as made:
        await eventually(lambda: len(made.children()) == 2)
        processes = made.children()
        assert "did not answer within 1 s" in await failed(made)
        await eventually(gone(processes), 15)


async def test_a_stop_during_the_start_leaves_no_process(tmp_path: Path) -> None:
    async with engine(tmp_path, "--silent") as made:
        await eventually(lambda: len(made.children()) == 2)
        processes = made.children()
        waiting = asyncio.create_task(made.wait_ready())
        await asyncio.sleep(0)
        await made.stop()
        assert gone(processes)()
        with pytest.raises(Unavailable, match="stopped"):
            await waiting


async def test_it_rests_when_nobody_calls_and_the_next_call_wakes_it(tmp_path: Path) -> None:
    async with engine(tmp_path, idle_timeout=0.7) as made:
        busy = True
        made.busy = lambda: busy
        await ready(made)
        await asyncio.sleep(1.5)
        assert made.state == "ready", "it does not rest while a call is at work"
        processes = made.children()
        busy = False
        await eventually(lambda: made.state == "idle")
        await eventually(gone(processes), 15)
        with pytest.raises(Unavailable):
            _ = made.http
        await ready(made)
        assert made.starts == 2
        assert made.state == "ready"


async def test_a_rest_can_be_ended_by_a_stop(tmp_path: Path) -> None:
    async with engine(tmp_path, idle_timeout=0.1) as made:
        await ready(made)
        await eventually(lambda: made.state == "idle")
        await made.stop()
        assert made.state == "stopped"


async def test_a_port_that_is_taken_meanwhile_costs_only_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1], managed._free_port()])
        monkeypatch.setattr(managed, "_free_port", lambda: next(ports))
        async with engine(tmp_path) as made:
            await ready(made)
            assert made.starts == 2


async def test_its_phases_are_read_from_its_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="langgraph_art_server")
    lines = ["INFO Starting to load model tiny...", "INFO Loading weights took 0.44 seconds"]
    async with engine(tmp_path, "--say", *lines, "--silent") as made:
        await eventually(lambda: made.phase == "warming up")
    assert "engine: warming up" in caplog.text


async def test_it_sleeps_during_an_update_and_wakes_after_it(tmp_path: Path) -> None:
    async with engine(tmp_path) as made:
        made._sleeps = True
        await ready(made)
        async with made.aside():
            assert (await made.http.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert (await made.http.get("/is_sleeping")).json() == {"is_sleeping": False}
        with pytest.raises(ZeroDivisionError):
            async with made.aside():
                _ = 1 / 0
        assert (await made.http.get("/is_sleeping")).json() == {"is_sleeping": False}


async def test_one_that_does_not_wake_is_started_again(tmp_path: Path) -> None:
    async with engine(tmp_path, "--never-wake") as made:
        made._sleeps = True
        await ready(made)
        async with made.aside():
            pass
        await eventually(lambda: made.state == "starting")
        await ready(made)
        assert made.starts == 2
