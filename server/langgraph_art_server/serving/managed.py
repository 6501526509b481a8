"""The vLLM process of this server: started, watched, restarted after a crash, put to rest, stopped without a trace.

Invariant: it dies with this process, and while it is away calls wait instead of failing, unless it stays away.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from langgraph_art.guarded import GuardedProcess
from langgraph_art_server.config import ServerSettings
from langgraph_art_server.device import Device
from langgraph_art_server.errors import Unavailable
from langgraph_art_server.models import BaseModel
from langgraph_art_server.serving.engine import Engine
from langgraph_art_server.serving.vllm_command import VllmCommand

log = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""Crashes without a quarter of an hour of good service in between, after which the engine stays down."""
GOOD_SERVICE = 900.0
_PORTS = 3

_PHASES = {
    "Initializing a V1 LLM engine": "preparing",
    "Starting to load model": "loading the weights",
    "Loading weights took": "warming up",
    "KV cache size": "reserving the key-value cache",
    "Capturing": "capturing CUDA graphs",
    "init engine": "opening its port",
    "Application startup complete": "answering a first request",
}
"""What lines of vLLM's log mean; the last one in the log counts."""


class ManagedEngine(Engine):
    """A vLLM process of our own.

    Args:
        command: How to start it.
        settings: Settings of the server.
        model: Base model.
        device: Where it runs.
        log_path: File for its output.
    """

    def __init__(
        self, command: VllmCommand, settings: ServerSettings, model: BaseModel, device: Device, log_path: Path
    ) -> None:
        super().__init__(model, device, command.max_model_len)
        self.strict_tools = command.strict_tools
        self._command = command
        self._start_timeout = settings.start_timeout
        self._idle_timeout = settings.idle_timeout
        self._sleeps = device == "cuda" and settings.gpu_sharing == "sleep"
        self._log_path = log_path
        self._process: GuardedProcess | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()

    def start(self) -> None:
        """Start vLLM and watch over it; returns at once. Wait with :meth:`wait_ready`."""
        self._watcher = asyncio.create_task(self._watch(), name="engine")

    async def stop(self) -> None:
        """End vLLM and everything below it."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self._end_process()
        self._become("stopped")

    def wake(self) -> None:
        """End its rest; it then starts as it did at first."""
        if self.state == "idle":
            self.phase = "waking up"
            self._woken.set()

    def alive(self) -> bool:
        """Whether the process runs now."""
        return self._process is not None and self._process.poll() is None

    @asynccontextmanager
    async def aside(self) -> AsyncIterator[None]:
        """Asleep where it shares a GPU with the trainer: its weights wait in main memory, its cache is given up.

        Raises:
            Unavailable: It does not go to sleep.
        """
        if not self._sleeps or self.state != "ready":
            yield
            return
        await self._control("/sleep?level=1")
        try:
            yield
        finally:
            # One that cannot wake is dead for all purposes, whatever its /health says: the watcher starts another.
            try:
                await self._control("/wake_up")
            except Unavailable:
                log.exception("the engine does not wake up; it is started again")
                if self._process is not None:
                    await asyncio.to_thread(self._process.stop)

    async def _control(self, path: str) -> None:
        try:
            answer = await self.http.post(path, timeout=300.0)
        except httpx.TransportError as error:
            raise Unavailable(f"the engine went away at {path}", code="engine_restarting", retry_after=5) from error
        if answer.status_code != 200:
            raise Unavailable(f"the engine refused {path}: {answer.text[:500]}", code="engine_error")

    # -- life ---------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        crashes = 0
        served = False
        while True:
            begun = time.monotonic()
            try:
                await self._begin()
                served = True
                self.error = None
                log.info("engine ready after %.0f s", time.monotonic() - begun)
                if await self._serve():
                    await self._rest()
                    crashes = 0
                    continue
            except (_NotStarted, OSError, httpx.HTTPError) as error:
                reason = str(error) or type(error).__name__
            else:
                code = self._process.poll() if self._process else None
                reason = f"the engine process ended with exit code {code}{_MEMORY_HINT.get(code or 0, '')}"
            crashes = 1 if time.monotonic() - begun > GOOD_SERVICE else crashes + 1
            # An engine that never served will not serve the next time either: fail in bounded time.
            restart = served and crashes <= MAX_RESTARTS
            self.error = f"{reason}. {_cause(self._process.tail(400) if self._process else '')}"
            self.phase = "restarting after a crash"
            self._become("starting" if restart else "failed")
            await self._end_process()
            if not restart:
                log.error("%s", self.error)
                return
            log.warning("%s\nrestarting it (%d of %d)", self.error, crashes, MAX_RESTARTS)
            await asyncio.sleep(2.0 ** (crashes - 1))

    async def _serve(self) -> bool:
        """Serve until the process ends (False) or nobody has needed it for ``idle_timeout`` seconds (True)."""
        await self.on_ready()
        self._become("ready")
        needed = time.monotonic()
        while self.alive():
            await asyncio.sleep(0.5)
            if self.busy():
                needed = time.monotonic()
            if self._idle_timeout is not None and time.monotonic() - needed > self._idle_timeout:
                return True
        return False

    async def _rest(self) -> None:
        """End the process and wait for the next call."""
        self._woken.clear()
        self._become("idle")
        log.info("the engine rests after %.0f s without a call; the next one wakes it", self._idle_timeout)
        await self._end_process()
        await self._woken.wait()
        self._become("starting")

    async def _begin(self) -> None:
        for _ in range(_PORTS):
            try:
                return await self._begin_at(_free_port())
            except _NotStarted:
                # Somebody may have taken the port between our look and vLLM's start.
                if self._process is None or "address already in use" not in self._process.tail(400):
                    raise
        raise _NotStarted(f"the engine found none of {_PORTS} ports free")

    async def _begin_at(self, port: int) -> None:
        # The log of this start alone: an error of an earlier one must not be shown as its cause.
        self._log_path.unlink(missing_ok=True)
        self._process = GuardedProcess(
            self._arguments(port), env=self._command.environment(), log_path=self._log_path, grace=10.0
        )
        self._process.start()
        await self._connect(f"http://127.0.0.1:{port}")
        deadline = time.monotonic() + self._start_timeout
        # Asked beside the look at the process: whoever else holds its port may never answer.
        asked = asyncio.ensure_future(self._answers())
        try:
            while not (asked.done() and asked.result()):
                if not self.alive():
                    code = self._process.poll()
                    raise _NotStarted(
                        f"the engine ended with exit code {code} while it started{_MEMORY_HINT.get(code or 0, '')}"
                    )
                if time.monotonic() > deadline:
                    raise _NotStarted(
                        f"the engine did not answer within {self._start_timeout:.0f} s; it was {self.phase}. If it "
                        "only needs longer, raise --start-timeout"
                    )
                self._note_phase(self._process.tail(60))
                if asked.done():
                    asked = asyncio.ensure_future(self._answers())
                await asyncio.sleep(0.5)
        finally:
            asked.cancel()

    def _arguments(self, port: int) -> list[str]:
        return self._command.arguments(port)

    def _note_phase(self, log_text: str) -> None:
        found = {log_text.rfind(line): phase for line, phase in _PHASES.items() if line in log_text}
        if found and (phase := found[max(found)]) != self.phase:
            self.phase = phase
            log.info("engine: %s", phase)

    async def _end_process(self) -> None:
        await self._disconnect()
        if self._process is not None:
            await asyncio.to_thread(self._process.stop)


_MEMORY_HINT = {
    # 128 + SIGKILL, which is how the kernel ends a process when memory runs out.
    137: " (killed, most likely for want of memory: take a smaller --model, --max-model-len or --kv-cache-gb)"
}


class _NotStarted(Exception):
    """The engine did not come up; the message says how."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _cause(log_text: str) -> str:
    """The first error that the log names, which vLLM buries, and the log's last lines."""
    # vLLM repeats its process's name at the front of each line.
    lines = [re.sub(r"^\(\S+ pid=\d+\) ", "", line) for line in log_text.splitlines()]
    errors = [line.strip() for line in lines if re.search(r"^\s*[\w.]*(Error|Exception): |: error: ", line)]
    first = f"First error: {errors[0]}\n" if errors else ""
    return first + "Last log lines:\n" + ("\n".join(lines[-10:]) or "(none)")
