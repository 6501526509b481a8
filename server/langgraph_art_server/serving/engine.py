"""The engine as the rest of the server sees it: a vLLM server that answers requests and takes adapters.

Invariant: ``ready`` means that it answered a real request, not that its port is open (vLLM's own ``/health`` is fine
while it sleeps). Two kinds exist: one that this server starts and watches (`managed`), and a user's own (`external`).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import httpx

from langgraph_art_server.device import Device
from langgraph_art_server.errors import Unavailable
from langgraph_art_server.models import BaseModel

State = Literal["starting", "ready", "idle", "failed", "stopped"]

LIVE_ADAPTERS = 8
"""Versions that the engine keeps in memory; the gateway unloads idle ones beyond that."""

PROBE = {"prompt": [1], "max_tokens": 1, "temperature": 0}
"""The cheapest real request."""


async def _nothing() -> None:
    return


class Engine(ABC):
    """A vLLM server.

    Args:
        model: Base model.
        device: Where it runs.
        max_model_len: Context length in tokens, prompt and answer together.
    """

    def __init__(self, model: BaseModel, device: Device, max_model_len: int) -> None:
        self.model = model
        self.device: Device = device
        self.max_model_len = max_model_len
        self.served_name = model.name
        """The base model's name in requests to the engine."""
        self.processed_logprobs = True
        """Whether logprobs are those of the distribution that was sampled from, temperature included."""
        self.strict_tools = False
        """Whether a grammar holds every tool call."""
        self.state: State = "starting"
        self.error: str | None = None
        self.phase = "starting"
        """What it is doing while it starts, for people."""
        self.on_ready: Callable[[], Awaitable[None]] = _nothing
        """Called each time it has come up, before calls reach it: nothing is loaded in it."""
        self.busy: Callable[[], bool] = lambda: False
        """Whether a call or an update is at work; it is not put to rest then."""
        self._http: httpx.AsyncClient | None = None
        self._changed = asyncio.Event()

    @abstractmethod
    def start(self) -> None:
        """Bring it up and watch over it; returns at once. Wait with :meth:`wait_ready`."""

    @abstractmethod
    async def stop(self) -> None:
        """Let go of it."""

    def wake(self) -> None:  # noqa: B027 - only a managed one ever rests
        """Bring it up again if it was put to rest for want of calls."""

    @asynccontextmanager
    async def aside(self) -> AsyncIterator[None]:
        """Out of the way of an update that needs its memory; no call is with it meanwhile."""
        yield

    async def wait_ready(self) -> None:
        """Wait until the engine serves.

        Raises:
            Unavailable: It failed or was stopped; the message holds its last log lines.
        """
        while self.state in ("starting", "idle"):
            self._changed.clear()
            self.wake()
            await self._changed.wait()
        if self.state != "ready":
            raise Unavailable(f"the engine is {self.state}: {self.error or 'it was stopped'}", code="engine_failed")

    @property
    def http(self) -> httpx.AsyncClient:
        """Client whose base URL is the engine. Only valid while :attr:`state` is ``ready``."""
        if self._http is None:
            raise Unavailable("the engine is being restarted", code="engine_restarting", retry_after=5)
        return self._http

    def _become(self, state: State) -> None:
        self.state = state
        self._changed.set()

    async def _connect(self, url: str, headers: dict[str, str] | None = None) -> None:
        await self._disconnect()
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            # No proxy of the environment stands between us and ourselves.
            trust_env=False,
            # An answer may take as long as it takes; only connecting has a limit.
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
        )

    async def _disconnect(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    async def _answers(self) -> bool:
        try:
            answer = await self.http.post("/v1/completions", json={"model": self.served_name, **PROBE}, timeout=60.0)
        except httpx.TransportError:
            return False
        return answer.status_code == 200

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
