"""A user's own vLLM: what is asked of it, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from langgraph_art_server.config import ServerSettings
from langgraph_art_server.errors import Unavailable
from langgraph_art_server.models import BaseModel
from langgraph_art_server.serving.external import ExternalEngine

from .rooms import eventually
from .stub_engine import StubEngine


@asynccontextmanager
async def engine(url: str, tmp_path: Path, **settings: Any) -> AsyncIterator[ExternalEngine]:
    config = {"model_type": "llama", "max_position_embeddings": 512, "vocab_size": 64}
    chosen = ServerSettings(engine_url=url, **settings)
    made = ExternalEngine(chosen, BaseModel("tiny", tmp_path, config), "cpu")
    made.start()
    try:
        yield made
    finally:
        await made.stop()


async def failure(made: ExternalEngine) -> str:
    async with asyncio.timeout(10):
        with pytest.raises(Unavailable) as caught:
            await made.wait_ready()
    return caught.value.message


async def test_it_learns_name_limit_and_logprobs(tmp_path: Path) -> None:
    async with StubEngine(name="org/tiny").running() as stub, engine(f"{stub.url}/v1", tmp_path) as made:
        async with asyncio.timeout(10):
            await made.wait_ready()
        assert made.served_name == "org/tiny"
        assert made.max_model_len == 64
        assert made.processed_logprobs
        (tmp_path / "adapter_config.json").write_text("{}")
        await made.load_adapter("desk@1", tmp_path)
        assert set(stub.adapters) == {"desk@1"}, "the probe left nothing behind"


async def test_a_smaller_limit_can_be_asked_for(tmp_path: Path) -> None:
    async with StubEngine().running() as stub, engine(stub.url, tmp_path, max_model_len=32) as made:
        async with asyncio.timeout(10):
            await made.wait_ready()
        assert made.max_model_len == 32


async def test_raw_logprobs_are_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with StubEngine(raw_logprobs=True).running() as stub, engine(stub.url, tmp_path) as made:
        async with asyncio.timeout(10):
            await made.wait_ready()
        assert not made.processed_logprobs
    assert "--logprobs-mode processed_logprobs" in caplog.text


@pytest.mark.parametrize(
    ("stub", "message"),
    [
        (StubEngine(takes_adapters=False), "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora"),
        (StubEngine(vocabulary=100), "start both with the same model"),
        (StubEngine(vocabulary=50), "start both with the same model"),
    ],
)
async def test_a_server_that_cannot_be_used_is_told_why(tmp_path: Path, stub: StubEngine, message: str) -> None:
    async with stub.running(), engine(stub.url, tmp_path) as made:
        assert message in await failure(made)
        assert made.state == "failed"


async def test_nobody_there(tmp_path: Path) -> None:
    async with engine("http://127.0.0.1:9", tmp_path, start_timeout=0.6) as made:
        assert "no vLLM server answers at http://127.0.0.1:9" in await failure(made)


async def test_while_it_is_away_calls_wait_and_what_was_loaded_is_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("langgraph_art_server.serving.external._LOOK", 0.05)
    came_up = 0

    async def note() -> None:
        nonlocal came_up
        came_up += 1

    stub = StubEngine()
    async with stub.running(), engine(stub.url, tmp_path) as made:
        made.on_ready = note
        async with asyncio.timeout(10):
            await made.wait_ready()
        stub._refuse_first = 3
        await eventually(lambda: made.state == "starting")
        async with asyncio.timeout(10):
            await made.wait_ready()
        assert came_up == 2
