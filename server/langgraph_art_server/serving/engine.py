"""The vLLM process: started, watched, restarted after a crash, stopped without a trace.

Invariant: it listens on the loopback interface only, since its control endpoints have no guard of their own, and it
dies with this process. ``ready`` means that it answered a real request, not that its port is open.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil

from langgraph_art.guarded import GuardedProcess
from langgraph_art_server.config import ServerSettings
from langgraph_art_server.device import Device
from langgraph_art_server.errors import Unavailable
from langgraph_art_server.models import BaseModel
from langgraph_art_server.serving.families import Family

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "failed", "stopped"]

MAX_RESTARTS = 3
"""Crashes without a quarter of an hour of good service in between, after which the engine stays down."""
GOOD_SERVICE = 900.0
_CPU_CONTEXT = 2048
LIVE_ADAPTERS = 8
"""Versions that the engine keeps in memory; the gateway unloads idle ones beyond that."""


class Engine:
    """One vLLM server.

    Args:
        settings: Settings of the server.
        model: Base model.
        family: Parsers and chat template.
        device: Where it runs.
        log_path: File for its output.
    """

    def __init__(
        self, settings: ServerSettings, model: BaseModel, family: Family, device: Device, log_path: Path
    ) -> None:
        self.model = model
        self.device = device
        self.state: State = "starting"
        self.error: str | None = None
        self.max_model_len = settings.max_model_len or min(
            model.context_length, _CPU_CONTEXT if device == "cpu" else model.context_length
        )
        self.on_restart: Callable[[], None] = lambda: None
        """Called after a crash, before the engine is started again: nothing is loaded any more."""
        self._settings = settings
        self._family = family
        self._log_path = log_path
        self._process: GuardedProcess | None = None
        self._changed = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._http: httpx.AsyncClient | None = None

    # -- life ---------------------------------------------------------------------------------------------------------

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

    async def wait_ready(self) -> None:
        """Wait until the engine serves.

        Raises:
            Unavailable: It failed or was stopped; the message holds its last log lines.
        """
        while self.state == "starting":
            self._changed.clear()
            await self._changed.wait()
        if self.state != "ready":
            raise Unavailable(f"the engine is {self.state}: {self.error or 'it was stopped'}", code="engine_failed")

    @property
    def http(self) -> httpx.AsyncClient:
        """Client whose base URL is the engine. Only valid while :attr:`state` is ``ready``."""
        if self._http is None:
            raise Unavailable("the engine is being restarted", code="engine_restarting", retry_after=5)
        return self._http

    def alive(self) -> bool:
        """Whether the process runs now."""
        return self._process is not None and self._process.poll() is None

    async def _watch(self) -> None:
        crashes = 0
        served = False
        while True:
            begun = time.monotonic()
            try:
                await self._begin()
                served = True
                self.error = None
                self._become("ready")
                log.info("engine ready after %.0f s", time.monotonic() - begun)
                while self.alive():
                    await asyncio.sleep(0.5)
            except (_NotStarted, OSError, httpx.HTTPError) as error:
                reason = str(error) or type(error).__name__
            else:
                code = self._process.poll() if self._process else None
                reason = f"the engine process ended with exit code {code}{_MEMORY_HINT.get(code or 0, '')}"
            crashes = 1 if time.monotonic() - begun > GOOD_SERVICE else crashes + 1
            # An engine that never served will not serve the next time either: fail in bounded time.
            restart = served and crashes <= MAX_RESTARTS
            self.error = f"{reason}. {_cause(self._process.tail(400) if self._process else '')}"
            self._become("starting" if restart else "failed")
            await self._end_process()
            if not restart:
                log.error("%s", self.error)
                return
            log.warning("%s\nrestarting it (%d of %d)", self.error, crashes, MAX_RESTARTS)
            self.on_restart()
            await asyncio.sleep(2.0 ** (crashes - 1))

    async def _begin(self) -> None:
        port = _free_port()
        # The log of this start alone: an error of an earlier one must not be shown as its cause.
        self._log_path.unlink(missing_ok=True)
        self._process = GuardedProcess(
            self._command(port), env=self._environment(), log_path=self._log_path, grace=10.0
        )
        self._process.start()
        self._http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            # No proxy of the environment stands between us and ourselves.
            trust_env=False,
            # An answer may take as long as it takes; only connecting has a limit.
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
        )
        deadline = time.monotonic() + self._settings.start_timeout
        while True:
            if not self.alive():
                code = self._process.poll()
                raise _NotStarted(
                    f"the engine ended with exit code {code} while it started{_MEMORY_HINT.get(code or 0, '')}"
                )
            if time.monotonic() > deadline:
                raise _NotStarted(f"the engine did not answer within {self._settings.start_timeout:.0f} s")
            if await self._answers():
                return
            await asyncio.sleep(0.5)

    async def _answers(self) -> bool:
        try:
            answer = await self.http.post(
                "/v1/completions",
                json={"model": self.model.name, "prompt": [1], "max_tokens": 1, "temperature": 0},
                timeout=60.0,
            )
        except httpx.TransportError:
            return False
        return answer.status_code == 200

    async def _end_process(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()
        if self._process is not None:
            await asyncio.to_thread(self._process.stop)

    def _become(self, state: State) -> None:
        self.state = state
        self._changed.set()

    # -- adapters -----------------------------------------------------------------------------------------------------

    async def load_adapter(self, name: str, directory: Path) -> None:
        """Load a PEFT directory under a name that was never used before.

        Raises:
            Unavailable: vLLM refused it or is away; the message holds its reason.
        """
        await self._adapter("load", {"lora_name": name, "lora_path": str(directory)})

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter."""
        await self._adapter("unload", {"lora_name": name})

    async def _adapter(self, action: str, body: dict[str, Any]) -> None:
        try:
            answer = await self.http.post(f"/v1/{action}_lora_adapter", json=body, timeout=120.0)
        except httpx.TransportError as error:
            raise Unavailable(
                f"the engine went away while it was to {action} {body['lora_name']}",
                code="engine_restarting",
                retry_after=5,
            ) from error
        # A request that timed out may have done its work, and names are never used twice.
        done_before = {"load": (400, "has already been loaded"), "unload": (404, "")}[action]
        if answer.status_code == done_before[0] and done_before[1] in answer.text:
            return
        if answer.status_code != 200:
            reason = answer.text.replace(body.get("lora_path", "\0"), "its directory")[:500]
            raise Unavailable(f"the engine could not {action} {body['lora_name']}: {reason}", code="adapter_not_loaded")

    # -- how it is started --------------------------------------------------------------------------------------------

    def _command(self, port: int) -> list[str]:
        settings = self._settings
        dtype = settings.dtype
        if dtype == "auto":
            dtype = "float32" if self.device == "cpu" else "bfloat16"
        arguments: dict[str, str | int | float | Path | None] = {
            "--model": self.model.directory,
            "--served-model-name": self.model.name,
            "--host": "127.0.0.1",
            "--port": port,
            "--dtype": dtype,
            "--max-model-len": self.max_model_len,
            "--max-num-seqs": settings.max_concurrency,
            "--max-lora-rank": settings.max_lora_rank,
            "--max-loras": 2,
            "--max-cpu-loras": LIVE_ADAPTERS,
            # Behaviour logprobs must be those of the distribution that was sampled from, and that distribution must
            # not depend on defaults hidden in the model's files.
            "--logprobs-mode": "processed_logprobs",
            "--generation-config": "vllm",
            "--chat-template": self.chat_template,
            "--reasoning-parser": self.reasoning_parser,
            "--tool-call-parser": self.tool_parser,
        }
        flags = ["--enable-lora", "--no-enable-log-requests"]
        if self.tool_parser:
            flags.append("--enable-auto-tool-choice")
        if self.device == "cpu":
            # Prefix caching shares whole blocks: the CPU default of 128 tokens would share little of a chat prompt.
            arguments["--block-size"] = 32
            # See VLLM_ENABLE_V1_MULTIPROCESSING below.
            arguments["--distributed-executor-backend"] = "uni"
            arguments["--worker-extension-cls"] = "langgraph_art_server.serving.cpu_lora.WorkerExtension"
        if self.device == "cuda":
            # Serving and training share the GPU: a fixed half each, unless the user splits it otherwise.
            arguments["--gpu-memory-utilization"] = 0.45
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags]
        for name, value in arguments.items():
            if value is not None:
                command += [name, str(value)]
        return command + settings.engine_args

    @property
    def tool_parser(self) -> str | None:
        """Tool-call parser in use."""
        return self._settings.tool_parser or self._family.tool_parser

    @property
    def strict_tools(self) -> bool:
        """Whether vLLM holds every tool call to a grammar: as it was told, or because its parser always does."""
        given = " ".join(self._settings.engine_args).replace("=", " ").split()
        told = "--tool-strict-level" in given[:-1] and given[given.index("--tool-strict-level") + 1] != "auto"
        return told or self.tool_parser in ("glm45", "glm47")

    @property
    def reasoning_parser(self) -> str | None:
        """Reasoning parser in use."""
        return self._settings.reasoning_parser or self._family.reasoning_parser

    @property
    def chat_template(self) -> Path | None:
        """Chat template in use; ``None``: the model's own."""
        if self._settings.chat_template:
            return Path(self._settings.chat_template).expanduser().resolve()
        return self._family.chat_template

    def _environment(self) -> dict[str, str]:
        environment = {
            **os.environ,
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        # Our own key and settings are none of its business.
        for name in [name for name in environment if name.startswith("LANGGRAPH_ART_") or name == "VLLM_API_KEY"]:
            del environment[name]
        if self.model.directory.exists():
            environment.setdefault("HF_HUB_OFFLINE", "1")
        if self.device == "cpu":
            environment.update(self._cpu_environment())
        return environment

    def _cpu_environment(self) -> dict[str, str]:
        physical = psutil.cpu_count(logical=False) or 1
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": str(self._settings.kv_cache_gb),
            # Lets the worker live within the engine's process: as a process of its own it would be polled for its
            # answers, which costs half a core.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # vLLM would leave a core of a two-core machine idle; the operating system places the threads better.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(min(physical, len(os.sched_getaffinity(0)))),
            # Milliseconds that a waiting thread spins: the trainer wants the cores as well.
            "KMP_BLOCKTIME": "1",
        }
        openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
        if openmp.exists():
            environment["LD_PRELOAD"] = " ".join([str(openmp), *os.environ.get("LD_PRELOAD", "").split()])
        return environment


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


def describe(engine: Engine) -> str:
    """The engine's choices in one line, for the start message."""
    template = engine.chat_template.name if engine.chat_template else "the model's own"
    return json.dumps(
        {
            "model": engine.model.name,
            "device": engine.device,
            "max_model_len": engine.max_model_len,
            "tool_parser": engine.tool_parser,
            "reasoning_parser": engine.reasoning_parser,
            "chat_template": template,
        }
    )
