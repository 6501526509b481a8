"""The embedded server as a process: failures are fast, clear, and leave nothing. Its success needs the engine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from langgraph_art import guarded
from langgraph_art.embedded import EmbeddedServer
from langgraph_art.errors import ServerStartFailed
from langgraph_art.trainer import Trainer

from .conftest import build

# Processes are started again and again.
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LANGGRAPH_ART_URL", raising=False)
    monkeypatch.delenv("LANGGRAPH_ART_API_KEY", raising=False)


def _children() -> set[int]:
    return guarded._descendants(os.getpid())


def test_a_taken_port_is_named_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerStartFailed, match=rf"Port {port} is taken.*port=0"):
            EmbeddedServer("m", port=port).start()


def test_by_default_it_takes_the_port_where_models_look(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("LANGGRAPH_ART_URL", f"http://127.0.0.1:{port}")
        with pytest.raises(ServerStartFailed, match=f"Port {port} is taken"):
            EmbeddedServer("m").start()


def test_a_server_that_cannot_start_shows_its_last_lines(tmp_path: Path) -> None:
    server = EmbeddedServer("m", port=0, data_dir=tmp_path, progress=False, no_such_option=1)
    before = _children()
    with pytest.raises(ServerStartFailed, match=r"(?s)exit code 2.*No such option.*--no-such-option"):
        server.start()
    assert not server.running
    assert "LANGGRAPH_ART_URL" not in os.environ
    assert (tmp_path / "server.log").exists()
    assert not _children() - before


async def test_the_async_form_and_a_trainer_fail_in_the_same_way(tmp_path: Path) -> None:
    server = EmbeddedServer("m", port=0, data_dir=tmp_path, progress=False, no_such_option=1)
    with pytest.raises(ServerStartFailed, match="No such option"):
        async with server:
            pass
    async with Trainer(build(), [1], lambda run: 0.0, policies=["desk"], server=server, progress=False) as trainer:
        with pytest.raises(ServerStartFailed, match="No such option"):
            await trainer.afit(1)


def test_a_server_that_never_gets_ready_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start-up time limit, with a server process that does not answer at all."""
    (tmp_path / "langgraph_art.py").write_text("import time; print('loading', flush=True); time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    server = EmbeddedServer("m", port=0, data_dir=tmp_path / "data", start_timeout=2, progress=False)
    before = _children()
    with pytest.raises(ServerStartFailed, match=r"(?s)not ready after 2 s \(see start_timeout\).*loading"):
        server.start()
    assert not _children() - before


def test_a_key_is_not_on_the_command_line() -> None:
    server = EmbeddedServer("m", api_key="sesame", engine_args=["--seed=1"], policies=["a", "b"], dtype="float32")
    assert "sesame" not in " ".join(server._arguments)
    assert server._arguments == ["--model=m", "--dtype=float32", "--policy=a", "--policy=b"]


def test_use_before_the_start_is_named() -> None:
    server = EmbeddedServer("m")
    with pytest.raises(RuntimeError, match="with block"):
        _ = server.url
    server.stop()


@pytest.mark.engine
def test_it_serves_and_leaves_nothing(tmp_path: Path) -> None:
    from langgraph_art.client import Client

    with EmbeddedServer(port=0, data_dir=tmp_path, policies=["desk"], max_model_len=256, progress=False) as server:
        assert os.environ["LANGGRAPH_ART_URL"] == server.url
        with Client() as client:
            assert client.info().policies == ["desk"]
        port = int(server.url.rpartition(":")[2])
    assert "LANGGRAPH_ART_URL" not in os.environ
    with socket.create_server(("127.0.0.1", port)):
        pass
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in listed, "no engine or trainer that works on our data is left"
    assert sys.executable in listed
