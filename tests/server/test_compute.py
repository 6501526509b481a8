"""Calls and updates taking turns."""

from __future__ import annotations

import asyncio

from langgraph_art_server.serving.compute import ComputeLease


async def test_an_update_waits_for_calls_and_keeps_new_ones_out() -> None:
    lease, events = ComputeLease(exclusive=True), []

    async def call(name: str, seconds: float) -> None:
        async with lease.call():
            events.append(f"{name} begins")
            await asyncio.sleep(seconds)
            events.append(f"{name} ends")

    async def update() -> None:
        async with lease.update():
            events.append("update begins")
            await asyncio.sleep(0.05)
            events.append("update ends")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(call("first", 0.05))
        await asyncio.sleep(0.01)
        tasks.create_task(update())
        await asyncio.sleep(0.01)
        tasks.create_task(call("second", 0.0))
    assert events == ["first begins", "first ends", "update begins", "update ends", "second begins", "second ends"]


async def test_an_update_beside_calls_where_devices_are_separate() -> None:
    lease = ComputeLease(exclusive=False)
    async with lease.call(), lease.update(), lease.call():
        pass


async def test_a_cancelled_update_lets_calls_in_again() -> None:
    lease = ComputeLease(exclusive=True)
    async with lease.call():
        waiting = asyncio.create_task(_update(lease))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(1), lease.call():
        pass


async def test_a_call_cancelled_while_it_waits_holds_nothing() -> None:
    lease = ComputeLease(exclusive=True)
    async with lease.update():
        waiting = asyncio.create_task(_call(lease))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(1), lease.update():
        pass


async def _update(lease: ComputeLease) -> None:
    async with lease.update():
        pass


async def _call(lease: ComputeLease) -> None:
    async with lease.call():
        pass
