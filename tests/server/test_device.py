"""Which GPUs the engine and the trainer see, and options that would do nothing."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from langgraph_art_server.config import ServerSettings
from langgraph_art_server.device import split_gpus


def test_the_trainer_gets_one_and_the_engine_the_others() -> None:
    assert split_gpus(1, "0,1,2") == ("0,2", "1")
    assert split_gpus(0, "GPU-a, GPU-b") == ("GPU-b", "GPU-a")


@pytest.mark.parametrize(("train_gpu", "visible"), [(0, "3"), (2, "0,1"), (0, "")])
def test_there_must_be_one_for_each(train_gpu: int, visible: str) -> None:
    with pytest.raises(ValueError, match="needs that GPU and another"):
        split_gpus(train_gpu, visible)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine_api_key": "k"}, "engine_url"),
        ({"engine_url": "http://x", "dtype": "float32", "idle_timeout": 5}, "dtype, idle_timeout"),
        ({"gpu_sharing": "sleep", "train_gpu": 1}, "one GPU for both"),
    ],
)
def test_options_that_cannot_act_together_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ServerSettings(**settings)


@pytest.mark.parametrize(
    ("device", "settings"),
    [("cpu", {"gpu_sharing": "split"}), ("cpu", {"train_gpu": 0}), ("cuda", {"kv_cache_gb": 2})],
)
def test_options_of_another_device_are_refused(device: str, settings: dict[str, Any]) -> None:
    chosen = ServerSettings(**settings)
    with pytest.raises(ValueError, match=next(iter(settings))):
        chosen.check_device(device)
    ServerSettings().check_device(device)
