"""A trainer whose base model is rounded otherwise than the engine's."""

from __future__ import annotations

from pathlib import Path

import pytest

from langgraph_art_server.config import ServerSettings
from langgraph_art_server.models import find_model
from langgraph_art_server.training.trainer import Trainer

from .tasks import call, group, policy_task, train_task


@pytest.mark.parametrize(
    ("engine_args", "trainer", "apart"),
    [
        ([], None, False),
        ([], "4bit", True),
        (["--quantization=fp8"], None, True),
        (["--quantization", "bitsandbytes"], "4bit", False),
        (["-q", "bitsandbytes"], "8bit", True),
    ],
)
def test_when_engine_and_trainer_disagree(engine_args: list[str], trainer: str | None, apart: bool) -> None:
    settings = ServerSettings.model_validate({"engine_args": engine_args, "trainer_quantization": trainer})
    assert settings.quantized_apart == apart


@pytest.mark.slow
async def test_packed_trainer_warns_and_corrects(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ServerSettings(trainer_quantization="8bit")
    trainer = Trainer(settings, find_model(str(model_dir)), "cpu", tmp_path / "log")
    runs = [group((1.0, [call([1, 2, 3], [5, 6])]), (0.0, [call([1, 2, 4], [9, 8, 7])]))]
    trained = await trainer.train(train_task(policy_task(runs, tmp_path)), lambda done, total: None)
    await trainer.stop()
    assert "jobs that name no correction get token_truncation" in caplog.text
    assert "correction_share" in trained.updates[0].metrics
