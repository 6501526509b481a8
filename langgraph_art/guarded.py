"""A child process that cannot outlive us, nor can anything that it started.

Invariant: when this process ends, even by ``kill -9``, every process below the guarded command is gone at most
``grace`` seconds (plus a moment) later. A small guard process reads a pipe whose other end only we hold: end of file
means that we are gone. On Linux the guard also adopts orphans, so a descendant that left the process group is found
too; elsewhere only the process group is covered. Standard library only: the guard starts in milliseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

_LINUX = sys.platform.startswith("linux")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TICK = 1.0  # seconds between looks at who our parent is, should another process hold our pipe open
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class _Process(NamedTuple):
    parent: int
    session: int


def _process_table() -> dict[int, _Process]:
    """Every live process by pid; empty where there is no ``/proc``. Zombies are left out: they hold nothing."""
    table: dict[int, _Process] = {}
    if not _LINUX:
        return table
    for entry in os.listdir("/proc"):  # noqa: PTH208 - pathlib costs a third of the guard's start-up
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):  # the process ended while we looked
            with open(f"/proc/{entry}/stat", encoding="ascii", errors="replace") as stat:  # noqa: PTH123
                # The command's name may hold spaces and brackets: what follows is counted from the last bracket.
                state, parent, _group, session = stat.read().rpartition(")")[2].split()[:4]
            if state not in "ZX":
                table[int(entry)] = _Process(int(parent), int(session))
    return table


def _descendants(root: int) -> set[int]:
    table = _process_table()
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.parent, []).append(pid)
    found: set[int] = set()
    todo = [root]
    while todo:
        below = [pid for pid in children.get(todo.pop(), []) if pid not in found]
        found.update(below)
        todo.extend(below)
    return found


def _send(pid: int, number: int) -> bool:
    """Send a signal; False if nobody is there. A negative pid means the process group."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):  # macOS answers EPERM for a group of zombies
        return False
    return True


def _prctl(option: int, value: int) -> None:
    if _LINUX:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# -- the guard process ------------------------------------------------------------------------------------------------


class _Guard:
    """Runs one command and sees to it that nothing of it is left."""

    def __init__(self, command: Sequence[str], grace: float) -> None:
        self._grace = grace
        self._stopping = False
        self._status: int | None = None
        self._parent = os.getppid()
        self._wake_read, wake_write = os.pipe()
        for fd in (self._wake_read, wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only the wake-up matters
        for number in _STOP_SIGNALS:
            signal.signal(number, self._on_stop)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            process_group=0,
            # Should somebody kill the guard itself. Safe here: the guard has one thread, so nothing is locked.
            preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )

    def _on_stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping = True

    def run(self) -> int:
        """Wait until the command ends or we have to end it; the command's exit code, 128 + n for signal n."""
        stdin_open = True
        while self._status is None and not self._stopping:
            readable, _, _ = select.select([0, self._wake_read] if stdin_open else [self._wake_read], [], [], _TICK)
            self._drain()
            if 0 in readable and not os.read(0, 4096):
                stdin_open, self._stopping = False, True
            if os.getppid() != self._parent:
                self._stopping = True
            self._reap()
        self._end_all()
        assert self._status is not None  # _end_all returns only when the command is reaped
        return self._status if self._status >= 0 else 128 - self._status

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def _reap(self) -> None:
        """Collect every ended child: the command, and orphans that Linux handed to us."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._process.pid:
                    self._status = os.waitstatus_to_exitcode(status)

    def _alive(self) -> bool:
        self._reap()
        # With the command reaped, a failing signal 0 says that the whole group is gone.
        return self._status is None or bool(_descendants(os.getpid())) or (not _LINUX and _send(-self._process.pid, 0))

    def _end_all(self) -> None:
        """SIGTERM to the group, ``grace`` seconds to obey, then SIGKILL to the group and to whoever left it."""
        deadline = time.monotonic() + self._grace
        if self._alive():
            _send(-self._process.pid, signal.SIGTERM)
        while self._alive() and time.monotonic() < deadline:
            select.select([self._wake_read], [], [], 0.05)
            self._drain()
        while self._alive():
            _send(-self._process.pid, signal.SIGKILL)
            for pid in _descendants(os.getpid()):
                _send(pid, signal.SIGKILL)
            time.sleep(0.02)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of the guard process: ``guarded.py [--grace SECONDS] -- COMMAND [ARGUMENT ...]``."""
    parser = argparse.ArgumentParser(prog="guarded", description="Run a command that ends when standard input does.")
    parser.add_argument("--grace", type=float, default=10.0, metavar="SECONDS", help="time between SIGTERM and SIGKILL")
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    options = parser.parse_args(arguments)
    try:
        guard = _Guard(options.command, options.grace)
    except OSError as error:
        print(f"cannot start {options.command[0]}: {error.strerror or error}", file=sys.stderr, flush=True)
        return 127
    return guard.run()


# -- the side of the owner --------------------------------------------------------------------------------------------


class GuardedProcess:
    """A command that ends, with all its descendants, when this process does.

    The command runs in its own session, so a Ctrl-C in the terminal reaches only us: call :meth:`stop`.

    Args:
        command: program and arguments.
        env: the whole environment; default: a copy of this process's.
        log_path: file that gets standard output and error, appended; its folder is made. Default: both are inherited.
        grace: seconds between SIGTERM and SIGKILL when it has to end.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        log_path: Path | str | None = None,
        grace: float = 10.0,
    ) -> None:
        self.command = list(command)
        self.log_path = Path(log_path) if log_path is not None else None
        self.grace = grace
        self._env = dict(env) if env is not None else None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the guard; the command is its child. RuntimeError before :meth:`start`."""
        return self._started().pid

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"{self.command[0]} has not been started: call start() first")
        return self._process

    def start(self) -> None:
        """Start the command. RuntimeError if it is running already. A command that cannot be found exits with 127."""
        if self._process is not None and self._process.poll() is None:
            raise RuntimeError(f"{self.command[0]} is already running")
        with contextlib.ExitStack() as stack:
            output = None
            if self.log_path is not None:
                self.log_path.parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context(self.log_path.open("ab"))
            self._process = subprocess.Popen(
                # -I -S: this file's folder stays off the path (its neighbours would shadow modules), and no site hooks.
                [sys.executable, "-I", "-S", __file__, "--grace", str(self.grace), "--", *self.command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT if output is not None else None,
                env=self._env,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """The command's exit code (128 + n if signal n ended it), or ``None`` while it runs."""
        process = self._started()
        code = process.poll()
        if code is not None and process.stdin is not None:
            process.stdin.close()
        if code is not None and code < 0:
            # Somebody killed the guard itself, so its work is ours: everything it started is in its session.
            for pid, other in _process_table().items():
                if other.session == process.pid:
                    _send(pid, signal.SIGKILL)
            return 128 - code
        return code

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait up to ``timeout`` seconds (default: for ever) for the command to end; as :meth:`poll`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._started().wait(timeout)
        return self.poll()

    def stop(self, timeout: float | None = None) -> int | None:
        """End the command and everything below it, and wait for that. Nothing happens if it was never started.

        Args:
            timeout: seconds until SIGKILL goes to everything still there; default: the grace time and 5 seconds.

        Returns:
            The exit code, ``None`` if it was never started.
        """
        process = self._process
        if process is None:
            return None
        assert process.stdin is not None  # PIPE above
        process.stdin.close()
        try:
            process.wait(self.grace + 5.0 if timeout is None else timeout)
        except subprocess.TimeoutExpired:
            for pid in [process.pid, *_descendants(process.pid)]:
                _send(pid, signal.SIGKILL)
            process.wait()
        return self.poll()

    def tail(self, lines: int = 20) -> str:
        """The last ``lines`` lines of the log; empty without a log file."""
        if self.log_path is None or not self.log_path.exists():
            return ""
        with self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 400 * lines))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])


if __name__ == "__main__":
    sys.exit(main())
