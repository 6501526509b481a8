"""A running stub engine and rooms around it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from .rooms import Rooms, open_rooms
from .stub_engine import StubEngine


@pytest.fixture
async def stub() -> AsyncIterator[StubEngine]:
    async with StubEngine().running() as stub:
        yield stub


@pytest.fixture
async def rooms(stub: StubEngine, tmp_path: Path) -> AsyncIterator[Rooms]:
    async with open_rooms(tmp_path, stub) as rooms:
        yield rooms
