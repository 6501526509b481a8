"""What a model name means, and which versions are in the engine."""

from __future__ import annotations

import asyncio

import pytest

from langgraph_art_server.errors import NotFound, Unavailable
from langgraph_art_server.serving.adapters import Target
from langgraph_art_server.serving.engine import LIVE_ADAPTERS

from .rooms import Rooms

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def loads(rooms: Rooms) -> list[str]:
    return [body["lora_name"] for body in rooms.stub.bodies(LOAD)]


async def test_a_plain_name_is_the_version_that_serves_and_a_pin_keeps_it(rooms: Rooms) -> None:
    resolve = rooms.adapters.resolve
    assert await resolve("desk", None) == Target("desk", 0)
    assert await resolve("desk", "g1") == Target("desk", 0)
    rooms.add_version("desk")
    assert await resolve("desk", None) == Target("desk", 1)
    assert await resolve("desk", "g1") == Target("desk", 0)
    assert await resolve("desk", "g2") == Target("desk", 1)
    assert await resolve("clerk", "g2") == Target("clerk", 0)
    assert await resolve("tiny", "g2") == Target(None, None)


async def test_a_version_can_be_named(rooms: Rooms) -> None:
    rooms.add_version("desk")
    assert await rooms.adapters.resolve("desk@0", "g1") == Target("desk", 0)
    assert await rooms.adapters.resolve("desk@1", None) == Target("desk", 1)
    assert await rooms.adapters.resolve("desk", "g1") == Target("desk", 1), "a version that is named pins nothing"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nobody", "'nobody' does not exist. Policies: clerk, desk; base model: tiny"),
        ("desk@7", "'desk' has no version 7"),
        ("nobody@0", "'nobody' has no version 0"),
        ("desk@latest", "such as desk@3"),
        ("desk@", "such as desk@3"),
        ("", "'' does not exist"),
    ],
)
async def test_an_unknown_model_is_told_what_there_is(rooms: Rooms, model: str, message: str) -> None:
    for pin in (None, "g1"):
        with pytest.raises(NotFound, match=message) as caught:
            await rooms.adapters.resolve(model, pin)
        assert caught.value.code == "model_not_found"


async def test_version_zero_is_the_base_model_itself(rooms: Rooms) -> None:
    for target in (Target("desk", 0), Target(None, None)):
        async with rooms.adapters.lease(target) as name:
            assert name == "tiny"
    assert loads(rooms) == []


async def test_a_lease_loads_once_and_keeps(rooms: Rooms) -> None:
    target = Target("desk", rooms.add_version("desk"))
    for _ in range(2):
        async with rooms.adapters.lease(target) as name:
            assert name == "desk@1"
            assert set(rooms.stub.adapters) == {"desk@1"}
    assert loads(rooms) == ["desk@1"]


async def test_calls_that_come_together_load_a_version_once(rooms: Rooms) -> None:
    target = Target("desk", rooms.add_version("desk"))

    async def call() -> None:
        async with rooms.adapters.lease(target):
            assert "desk@1" in rooms.stub.adapters

    await asyncio.gather(*[call() for _ in range(16)])
    assert loads(rooms) == ["desk@1"]


async def test_room_is_made_by_unloading_the_idlest_that_nobody_uses(rooms: Rooms) -> None:
    for _ in range(LIVE_ADAPTERS + 3):
        rooms.add_version("desk")
    async with rooms.adapters.lease(Target("desk", 1)):
        for version in range(2, LIVE_ADAPTERS + 1):
            await rooms.adapters.load("desk", version)
        await rooms.adapters.load("desk", 2)  # used again: 3 is the idlest now
        await rooms.adapters.load("desk", LIVE_ADAPTERS + 1)
        assert {body["lora_name"] for body in rooms.stub.bodies(UNLOAD)} == {"desk@3"}
        await rooms.adapters.load("desk", LIVE_ADAPTERS + 2)
        assert "desk@1" in rooms.stub.adapters
        assert "desk@2" in rooms.stub.adapters
        assert len(rooms.stub.adapters) == LIVE_ADAPTERS
    await rooms.adapters.load("desk", LIVE_ADAPTERS + 3)
    assert "desk@1" not in rooms.stub.adapters, "the lease has ended, and it was the idlest"
    await rooms.adapters.load("desk", 3)
    assert "desk@3" in rooms.stub.adapters


async def test_more_versions_in_use_than_have_room_wait_for_it(rooms: Rooms) -> None:
    for _ in range(LIVE_ADAPTERS + 2):
        rooms.add_version("desk")
    entered, leave = asyncio.Semaphore(0), asyncio.Semaphore(0)
    most = 0

    async def call(version: int) -> None:
        nonlocal most
        async with rooms.adapters.lease(Target("desk", version)) as name:
            most = max(most, len(rooms.stub.adapters))
            entered.release()
            await leave.acquire()
            assert name in rooms.stub.adapters

    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        for version in range(1, LIVE_ADAPTERS + 3):
            tasks.create_task(call(version))
        for _ in range(LIVE_ADAPTERS):
            await entered.acquire()
        await asyncio.sleep(0.05)
        assert entered.locked(), "the others wait"
        for _ in range(LIVE_ADAPTERS + 2):
            leave.release()
    assert most == LIVE_ADAPTERS
    assert len(loads(rooms)) == LIVE_ADAPTERS + 2


async def test_a_restart_loads_what_was_loaded_before_calls_come(rooms: Rooms) -> None:
    rooms.add_version("desk")
    rooms.add_version("desk")
    for version in (1, 2):
        await rooms.adapters.load("desk", version)
    rooms.engine.crash()
    assert rooms.stub.adapters == {}
    await rooms.engine.come_back()
    assert set(rooms.stub.adapters) == {"desk@1", "desk@2"}
    await rooms.adapters.load("desk", 1)
    assert loads(rooms) == ["desk@1", "desk@2", "desk@1", "desk@2"]


async def test_what_cannot_be_loaded_again_does_not_keep_the_engine_down(rooms: Rooms) -> None:
    for version in (1, 2):
        rooms.add_version("desk")
        await rooms.adapters.load("desk", version)
    rooms.engine.crash()
    rooms.stub.refuse_loads.append((500, "gone"))
    await rooms.engine.come_back()
    assert set(rooms.stub.adapters) == {"desk@2"}
    async with rooms.adapters.lease(Target("desk", 1)) as name:
        assert name in rooms.stub.adapters


async def test_a_refused_load_says_why_shows_no_path_and_can_be_tried_again(rooms: Rooms) -> None:
    target = Target("desk", rooms.add_version("desk"))
    rooms.stub.refuse_loads.append((500, "cannot read {path}: no memory"))
    with pytest.raises(Unavailable, match=r"could not load desk@1: .*its directory: no memory") as caught:
        async with rooms.adapters.lease(target):
            pytest.fail("nothing is loaded")
    assert str(rooms.data_dir) not in str(caught.value)
    async with rooms.adapters.lease(target) as name:
        assert name in rooms.stub.adapters


async def test_a_load_that_the_engine_did_but_nobody_heard_of_is_no_failure(rooms: Rooms) -> None:
    rooms.add_version("desk")
    rooms.stub.adapters["desk@1"] = "loaded by a request that timed out"
    await rooms.adapters.load("desk", 1)
    await rooms.adapters.load("desk", 1)
    assert loads(rooms) == ["desk@1"]


async def test_a_call_that_is_cancelled_while_it_loads_leaves_no_lease(rooms: Rooms) -> None:
    for _ in range(LIVE_ADAPTERS + 1):
        rooms.add_version("desk")

    async def call() -> None:
        async with rooms.adapters.lease(Target("desk", 1)):
            pytest.fail("it was cancelled")

    async with rooms.adapters._loading:
        waiting = asyncio.create_task(call())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    for version in range(1, LIVE_ADAPTERS + 2):
        await rooms.adapters.load("desk", version)
    assert "desk@1" not in rooms.stub.adapters
