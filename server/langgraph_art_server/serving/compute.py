"""Who computes when, where serving and training share a processor or a GPU's memory.

Invariant: while an update holds the device no call is with the engine, and calls that arrive wait instead of failing.
An update that waits goes before calls that arrive after it, so steady traffic cannot starve it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext


class ComputeLease:
    """Many calls or one update.

    Args:
        exclusive: Whether an update keeps calls out. False where training and serving have their own devices.
        aside: Entered for the time of an update, once no call is with the engine: it makes room for it.
    """

    def __init__(
        self, *, exclusive: bool, aside: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    ) -> None:
        self._exclusive = exclusive
        self._aside = aside
        self._calls = 0
        self._updating = False
        self._changed = asyncio.Condition()

    def in_use(self) -> bool:
        """Whether a call or an update is at work."""
        return self._calls > 0 or self._updating

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Hold the device for one call."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._updating)
            self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            await self._notify()

    @asynccontextmanager
    async def update(self) -> AsyncIterator[None]:
        """Hold the device for one update, once the calls in flight have ended."""
        if not self._exclusive:
            yield
            return
        async with self._changed:
            await self._changed.wait_for(lambda: not self._updating)
            self._updating = True
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._calls == 0)
            async with self._aside():
                yield
        finally:
            self._updating = False
            await self._notify()

    async def _notify(self) -> None:
        # Shielded: a cancelled caller must still wake the others.
        await asyncio.shield(asyncio.ensure_future(self._notify_all()))

    async def _notify_all(self) -> None:
        async with self._changed:
            self._changed.notify_all()
