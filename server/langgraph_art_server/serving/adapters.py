"""Policy versions in the engine: resolved from a name, loaded on demand, kept while a call uses them.

Invariant: every version has a name of its own in the engine (``researcher@12``), so no cache can mix two of them, and a
version is unloaded only while no call holds a lease on it. Version 0 is the base model itself: its adapter is zero.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from langgraph_art_server.errors import NotFound, Unavailable
from langgraph_art_server.serving.engine import LIVE_ADAPTERS, Engine
from langgraph_art_server.storage.policies import PolicyStore

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """What a model name means for one call."""

    policy: str | None
    version: int | None

    @property
    def name(self) -> str | None:
        """``researcher@12``, or ``None`` for the base model."""
        return None if self.policy is None else f"{self.policy}@{self.version}"


class Adapters:
    """Resolves model names and keeps versions loaded."""

    def __init__(self, engine: Engine, policies: PolicyStore, data_dir: Path) -> None:
        self._engine = engine
        self._policies = policies
        self._data_dir = data_dir
        # Loaded names, least recently used first.
        self._loaded: dict[str, None] = {}
        self._leases: dict[str, int] = defaultdict(int)
        self._loading = asyncio.Lock()
        self._left = asyncio.Event()
        """Set when a lease ends."""
        engine.on_ready = self._restore

    async def resolve(self, model: str, pin: str | None) -> Target:
        """What ``model`` means for a call of the run or group ``pin``.

        Raises:
            NotFound: There is no such policy or version; the message says what there is.
        """
        if model == self._engine.model.name:
            return Target(None, None)
        name, at, number = model.partition("@")
        if at:
            if not number.isdecimal():
                raise NotFound(
                    f"model {model!r}: after @ a version number is needed, such as {name}@3", code="model_not_found"
                )
            try:
                await asyncio.to_thread(self._policies.directory, name, int(number))
            except NotFound as error:
                raise NotFound(error.message, code="model_not_found") from error
            return Target(name, int(number))
        if pin is None:
            version = await asyncio.to_thread(self._policies.serving_version, name)
        else:
            version = await asyncio.to_thread(self._policies.pin, pin, name)
        if version is None:
            existing = await asyncio.to_thread(self._policies.names)
            raise NotFound(
                f"the model {model!r} does not exist. Policies: {', '.join(existing) or 'none yet'}; base model: "
                f"{self._engine.model.name}. Create a policy with `langgraph-art policies create {name}` or name it in "
                "Trainer(policies=[...]).",
                code="model_not_found",
            )
        return Target(name, version)

    @asynccontextmanager
    async def lease(self, target: Target) -> AsyncIterator[str]:
        """Keep a version loaded; yields its name in the engine.

        Raises:
            NotFound: There is no such version.
            Unavailable: The engine could not load it.
        """
        if target.policy is None or target.version is None or target.version == 0:
            yield self._engine.served_name
            return
        name = f"{target.policy}@{target.version}"
        self._leases[name] += 1
        try:
            await self.load(target.policy, target.version)
            yield name
        finally:
            self._leases[name] -= 1
            if not self._leases[name]:
                del self._leases[name]
                self._left.set()

    def leased(self, policy: str, version: int) -> bool:
        """Whether a call uses this version now; its checkpoint must stay where it is."""
        return f"{policy}@{version}" in self._leases

    async def load(self, policy: str, version: int) -> None:
        """Load a version if it is not loaded, making room by unloading the idlest one.

        Where every loaded version is in use, waits until one is not.

        Raises:
            NotFound: There is no such version.
            Unavailable: The engine could not load it.
        """
        name = f"{policy}@{version}"
        async with self._loading:
            while name not in self._loaded:
                if len(self._loaded) < LIVE_ADAPTERS:
                    await self._load(name, policy, version)
                elif idle := next((other for other in self._loaded if other not in self._leases), None):
                    await self._engine.unload_adapter(idle)
                    self._loaded.pop(idle, None)  # a restart may have taken it away meanwhile
                else:
                    self._left.clear()
                    await self._left.wait()
            # Move it to the end: most recently used.
            del self._loaded[name]
            self._loaded[name] = None

    async def _load(self, name: str, policy: str, version: int) -> None:
        directory = await asyncio.to_thread(self._policies.directory, policy, version)
        if directory is not None:
            await self._engine.load_adapter(name, self._data_dir / directory)
        self._loaded[name] = None

    async def _restore(self) -> None:
        """Load into an engine that has just come up what the one before it held."""
        before, self._loaded = list(self._loaded), {}
        for name in before:
            policy, _, version = name.rpartition("@")
            try:
                await self._load(name, policy, int(version))
            except (NotFound, Unavailable) as error:
                # The next call that wants it tries again and gets the reason.
                log.warning("%s is not loaded again: %s", name, error.message)
