"""A server of one's own, for the one-machine case: started as a child process, stopped without a trace.

Invariant: when the block ends, or this process dies in whatever way, neither the server nor its engine nor its trainer
is left, and the port is free.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import httpx
from rich.console import Console

from langgraph_art.errors import ServerStartFailed
from langgraph_art.guarded import GuardedProcess
from langgraph_art.settings import ClientSettings

_HOST = "127.0.0.1"
_GRACE = 20.0  # seconds for the server to end its engine and trainer in order


class EmbeddedServer:
    """``langgraph-art serve`` as a child process: a context manager, sync or async, or :meth:`start` and :meth:`stop`.

    While it runs, ``LANGGRAPH_ART_URL`` (and ``LANGGRAPH_ART_API_KEY``) of this process point to it, so that clients
    and ChatART models *made after* the start find it. A graph that was built before has looked already: leave ``port``
    alone then, because the default is the very address at which such a graph looks.

    Args:
        model: base model: a local directory or a Hugging Face repository; default: the server's own.
        port: default: the port in ``LANGGRAPH_ART_URL``, else 7373; 0 takes a free one.
        data_dir: directory of the database, checkpoints and logs; default: the server's own, in the user's data.
        policies: policies to create if they do not exist.
        api_key: the server then wants this key. It is passed in the environment, never on the command line.
        engine_args: raw arguments for vLLM.
        start_timeout: seconds until the server has to be ready.
        progress: show that it is starting.
        **options: further options of ``langgraph-art serve``, such as ``dtype="float32"`` or ``max_model_len=2048``.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        port: int | None = None,
        data_dir: Path | str | None = None,
        policies: Sequence[str] = (),
        api_key: str | None = None,
        engine_args: Sequence[str] = (),
        start_timeout: float = 300.0,
        progress: bool = True,
        **options: str | int | float | Path,
    ) -> None:
        self._port = port
        self._log_dir = Path(data_dir) if data_dir is not None else None
        self._api_key = api_key
        self._start_timeout = start_timeout
        self._progress = progress
        given = {"model": model, "data_dir": data_dir, **options}
        flags = [(name, value) for name, value in given.items() if value is not None]
        self._arguments = [f"--{name.replace('_', '-')}={value}" for name, value in flags]
        self._arguments += [f"--policy={name}" for name in policies]
        self._engine_args = list(engine_args)
        self._process: GuardedProcess | None = None
        self._url = ""
        self._environment_before: dict[str, str | None] = {}

    @property
    def running(self) -> bool:
        """Whether it was started and its process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def url(self) -> str:
        """Root URL; RuntimeError unless it was started."""
        if self._process is None:
            raise RuntimeError("the embedded server has not been started: use it in a with block, or call start()")
        return self._url

    @property
    def log_path(self) -> Path | None:
        """File with the server's output; ``None`` before the start."""
        return self._process.log_path if self._process is not None else None

    def start(self) -> None:
        """Start it and wait until it is ready; nothing happens if it runs already.

        Raises:
            ServerStartFailed: it ended, reported a failure or took too long. Nothing is left of it.
        """
        if self.running:
            return
        port = _choose_port(self._port)
        self._url = f"http://{_HOST}:{port}"
        command = [
            sys.executable,
            "-m",
            "langgraph_art",
            "serve",
            f"--host={_HOST}",
            f"--port={port}",
            *self._arguments,
        ]
        command += ["--", *self._engine_args] if self._engine_args else []
        key = {"LANGGRAPH_ART_SERVER_API_KEY": self._api_key} if self._api_key is not None else {}
        log_dir = self._log_dir or Path(tempfile.mkdtemp(prefix="langgraph-art-"))
        self._process = GuardedProcess(command, {**os.environ, **key}, log_dir / "server.log", grace=_GRACE)
        try:
            self._process.start()
            self._wait_until_ready(self._process)
        except BaseException:
            self.stop()
            raise
        self._set_environment({"LANGGRAPH_ART_URL": self._url, "LANGGRAPH_ART_API_KEY": self._api_key})

    def stop(self) -> None:
        """Stop it, and wait until nothing of it is left."""
        if self._process is not None:
            self._process.stop()
            self._process = None
        for name, value in self._environment_before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._environment_before = {}

    async def astart(self) -> None:
        """:meth:`start` without blocking the event loop."""
        try:
            await asyncio.to_thread(self.start)
        except BaseException:
            self.stop()  # when cancelled: the thread sees its process end, and ends too
            raise

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        await self.astart()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    def _set_environment(self, values: dict[str, str | None]) -> None:
        for name, value in values.items():
            if value is not None:
                self._environment_before.setdefault(name, os.environ.get(name))
                os.environ[name] = value

    def _wait_until_ready(self, process: GuardedProcess) -> None:
        started = time.monotonic()
        console = Console(stderr=True, quiet=not self._progress)
        # No proxy between us and our own machine, whatever the environment says.
        with console.status("starting the server") as status, httpx.Client(timeout=5.0, trust_env=False) as http:
            while (state := _health(http, self._url)) != ("ready", ""):
                seconds = time.monotonic() - started
                status.update(f"starting the server: {': '.join(filter(None, state))} ({seconds:.0f} s)")
                code = process.poll()
                if code is not None:
                    raise self._failure(process, f"ended with exit code {code}")
                if state[0] == "failed":
                    raise self._failure(process, f"reports: {state[1]}")
                if seconds > self._start_timeout:
                    raise self._failure(process, f"was not ready after {seconds:.0f} s (see start_timeout)")
                time.sleep(0.2)

    def _failure(self, process: GuardedProcess, what: str) -> ServerStartFailed:
        return ServerStartFailed(
            f"The embedded server {what}. `langgraph-art doctor` checks this machine. "
            f"Last lines of {process.log_path}:\n{process.tail(20)}"
        )


def _choose_port(port: int | None) -> int:
    if port is None:
        port = urlsplit(ClientSettings().url).port or 7373
    try:
        with socket.create_server((_HOST, port)) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        raise ServerStartFailed(
            f"Port {port} is taken. Stop what listens there (another langgraph-art server?), give another port, or "
            "port=0 for a free one and build the graph after the start."
        ) from error


def _health(http: httpx.Client, url: str) -> tuple[str, str]:
    """Status and detail; empty while nobody answers."""
    try:
        answer = http.get(f"{url}/health").json()
        status = str(answer["status"])
        return status, "" if status == "ready" else str(answer.get("detail") or "")
    except (httpx.TransportError, ValueError, KeyError):
        return "", ""
