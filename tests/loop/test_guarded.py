"""The guard against real processes: whatever happens to whom, nothing is left and nothing holds a port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from langgraph_art import guarded
from langgraph_art.guarded import GuardedProcess

# Real processes are started and killed again and again.
pytestmark = pytest.mark.slow

# A family: a child that ignores SIGTERM and listens, a grandchild that ignores it too, and one that left the group.
FAMILY = textwrap.dedent(
    """
    import os, signal, socket, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    kin = [subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=away) for away in (False, True)]
    listener = socket.create_server(("127.0.0.1", 0))
    time.sleep(0.3)
    print(listener.getsockname()[1], os.getpid(), *(k.pid for k in kin), flush=True)
    time.sleep(600)
    """
)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def family(log: Path) -> tuple[int, list[int]]:
    """Port and pids that the family printed into its log."""
    assert until(lambda: log.exists() and log.read_text().endswith("\n")), "the family did not start"
    port, *pids = map(int, log.read_text().split())
    assert all(alive(pid) for pid in pids)
    return port, pids


def assert_gone(port: int, pids: list[int]) -> None:
    assert until(lambda: not any(alive(pid) for pid in pids)), [pid for pid in pids if alive(pid)]
    with socket.create_server(("127.0.0.1", port), reuse_port=False):
        pass  # raises if somebody still listens


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "family.log"


def test_kill_9_of_the_owner_leaves_nothing(log: Path) -> None:
    owner_code = (
        "import sys, time; from langgraph_art.guarded import GuardedProcess;"
        f"p = GuardedProcess([sys.executable, '-c', {FAMILY!r}], log_path={str(log)!r}, grace=0.5); p.start();"
        "time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", owner_code])
    port, pids = family(log)
    owner.kill()
    owner.wait()
    assert_gone(port, pids)


def test_kill_9_of_the_owner_while_its_fork_holds_the_pipe(log: Path) -> None:
    """A forked child inherits our end of the pipe, so there is no end of file: the guard sees the parent change."""
    owner_code = (
        "import os, sys, time; from langgraph_art.guarded import GuardedProcess;"
        f"p = GuardedProcess([sys.executable, '-c', {FAMILY!r}], log_path={str(log)!r}, grace=0.2); p.start();"
        "pid = os.fork(); print(pid, flush=True) if pid else None; time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", owner_code], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    fork = int(owner.stdout.readline())
    try:
        port, pids = family(log)
        owner.kill()
        owner.wait()
        assert_gone(port, pids)
    finally:
        os.kill(fork, signal.SIGKILL)
        owner.stdout.close()


def test_kill_9_of_the_guard_is_cleaned_up_by_the_owner(log: Path) -> None:
    process = GuardedProcess([sys.executable, "-c", FAMILY], log_path=log)
    process.start()
    port, (command, grandchild, stray) = family(log)
    os.kill(process.pid, signal.SIGKILL)
    try:
        assert process.wait(5) == 128 + signal.SIGKILL
        assert_gone(port, [command, grandchild])
    finally:
        os.kill(stray, signal.SIGKILL)  # it left the session too: out of anybody's reach once the guard is dead


def test_stop_ends_everything(log: Path) -> None:
    process = GuardedProcess([sys.executable, "-c", FAMILY], log_path=log, grace=0.3)
    process.start()
    port, pids = family(log)
    assert process.poll() is None
    assert process.stop() == 128 + signal.SIGKILL
    assert_gone(port, pids)
    assert process.stop() == 128 + signal.SIGKILL, "stopping twice is fine"


def test_stop_with_a_timeout_below_the_grace_time(log: Path) -> None:
    process = GuardedProcess([sys.executable, "-c", FAMILY], log_path=log, grace=60)
    process.start()
    port, pids = family(log)
    started = time.monotonic()
    process.stop(timeout=0.3)
    assert time.monotonic() - started < 5
    assert_gone(port, pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_guard_takes_the_same_route(log: Path, number: signal.Signals) -> None:
    process = GuardedProcess([sys.executable, "-c", FAMILY], log_path=log, grace=0.3)
    process.start()
    port, pids = family(log)
    os.kill(process.pid, number)
    assert process.wait(10) == 128 + signal.SIGKILL
    assert_gone(port, pids)


def test_a_command_that_obeys_sigterm_is_not_made_to_wait(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7));"
        "print(1, flush=True); time.sleep(60)"
    )
    process = GuardedProcess([sys.executable, "-c", code], log_path=tmp_path / "log", grace=30)
    process.start()
    assert until(lambda: process.tail(1) == "1")
    started = time.monotonic()
    assert process.stop() == 7
    assert time.monotonic() - started < 5


def test_what_a_crashed_command_leaves_behind_is_ended(log: Path) -> None:
    process = GuardedProcess([sys.executable, "-c", FAMILY], log_path=log, grace=0.3)
    process.start()
    port, pids = family(log)
    os.kill(pids[0], signal.SIGKILL)
    assert process.wait(10) == 128 + signal.SIGKILL
    assert_gone(port, pids)


def test_nested_guards_end_inside_out(tmp_path: Path, log: Path) -> None:
    """A server that guards its engine is itself guarded: killing the outermost owner reaches the engine."""
    inner = (
        "import sys, time; from langgraph_art.guarded import GuardedProcess;"
        f"p = GuardedProcess([sys.executable, '-c', {FAMILY!r}], log_path={str(log)!r}, grace=0.2); p.start();"
        "time.sleep(600)"
    )
    process = GuardedProcess([sys.executable, "-c", inner], log_path=tmp_path / "outer.log", grace=5)
    process.start()
    port, pids = family(log)
    process.stop()
    assert_gone(port, pids)


@pytest.mark.parametrize(("code", "expected"), [("raise SystemExit(0)", 0), ("raise SystemExit(41)", 41)])
def test_exit_codes_are_forwarded(code: str, expected: int) -> None:
    process = GuardedProcess([sys.executable, "-c", code])
    process.start()
    assert process.wait(10) == expected


def test_a_command_that_does_not_exist_says_so(tmp_path: Path) -> None:
    process = GuardedProcess(["/no/such/program"], log_path=tmp_path / "log")
    process.start()
    assert process.wait(10) == 127
    assert process.tail() == "cannot start /no/such/program: No such file or directory"


def test_env_log_and_tail(tmp_path: Path) -> None:
    code = "import os, sys; [print(i) for i in range(100)]; print(os.environ['FLAVOUR'], file=sys.stderr)"
    env = {**os.environ, "FLAVOUR": "vanilla"}
    process = GuardedProcess([sys.executable, "-c", code], env=env, log_path=tmp_path / "new" / "log")
    process.start()
    assert process.wait(10) == 0
    lines = (tmp_path / "new" / "log").read_text().splitlines()
    assert sorted(lines) == sorted(["vanilla", *map(str, range(100))])
    assert process.tail(3) == "\n".join(lines[-3:])


def test_misuse_is_named() -> None:
    process = GuardedProcess(["sleep", "60"])
    assert process.stop() is None
    with pytest.raises(RuntimeError, match="sleep has not been started"):
        process.poll()
    process.start()
    with pytest.raises(RuntimeError, match="sleep is already running"):
        process.start()
    process.stop()


def test_the_guard_starts_fast_and_without_the_package() -> None:
    """It is started by path: the package, its dependencies and site hooks stay out."""
    probe = f"import runpy, sys; runpy.run_path({guarded.__file__!r}); print([m for m in sys.modules if '.' not in m])"
    answer = subprocess.run([sys.executable, "-I", "-S", "-c", probe], capture_output=True, text=True, check=True)
    assert not {"langgraph_art", "pydantic", "httpx", "site"} & set(eval(answer.stdout))
