from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch

from langgraph_art.protocol import TrainConfig
from langgraph_art_server.training.checkpoint import Checkpoint, TrainerState, read_checkpoint, write_checkpoint
from langgraph_art_server.training.model import PolicyModel

from .conftest import random_weights, tiny_llama
from .tasks import LORA

STATE = TrainerState(policy="p", version=4, parent=2, step=3, lora=LORA, config=TrainConfig(learning_rate=3e-4))


@pytest.fixture
def checkpoint(model: PolicyModel) -> Checkpoint:
    model.set_adapter(LORA, None)
    weights = random_weights(model)
    moments = {f"{name}.exp_avg": tensor / 3 for name, tensor in weights.items()}
    return Checkpoint(weights, moments, STATE)


def test_roundtrip(tmp_path: Path, model: PolicyModel, checkpoint: Checkpoint) -> None:
    write_checkpoint(tmp_path / "versions" / "4", checkpoint, model.adapter_config(LORA))
    read = read_checkpoint(tmp_path / "versions" / "4")
    assert read.state == STATE
    for wrote, got in ((checkpoint.weights, read.weights), (checkpoint.optimizer, read.optimizer)):
        assert wrote.keys() == got.keys()
        assert all(torch.equal(wrote[name], got[name]) for name in wrote)
    assert [path.name for path in (tmp_path / "versions").iterdir()] == ["4"], "no temporary directory is left"


def test_peft_loads_it_and_would_write_the_same(tmp_path: Path, model: PolicyModel, checkpoint: Checkpoint) -> None:
    write_checkpoint(tmp_path / "ours", checkpoint, model.adapter_config(LORA))
    loaded = peft.PeftModel.from_pretrained(tiny_llama(attention="sdpa"), tmp_path / "ours")
    loaded.save_pretrained(tmp_path / "theirs")
    theirs = read_tensors(tmp_path / "theirs" / "adapter_model.safetensors")
    assert theirs.keys() == checkpoint.weights.keys()
    assert all(torch.equal(theirs[name], checkpoint.weights[name]) for name in theirs)
    ours, written = (json.loads((tmp_path / side / "adapter_config.json").read_text()) for side in ("ours", "theirs"))
    assert ours.keys() == written.keys()
    assert sorted(written.pop("target_modules")) == ours.pop("target_modules")
    assert written == ours


def test_same_content_same_bytes_and_no_paths(tmp_path: Path, model: PolicyModel, checkpoint: Checkpoint) -> None:
    for name in ("a", "b"):
        write_checkpoint(tmp_path / name, checkpoint, model.adapter_config(LORA))
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors", "trainer_state.json"]
    for name in files:
        content = (tmp_path / "a" / name).read_bytes()
        assert content == (tmp_path / "b" / name).read_bytes()
        assert str(tmp_path).encode() not in content


def test_failed_write_leaves_nothing(
    tmp_path: Path, model: PolicyModel, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: TrainerState, **_: object) -> str:
        raise OSError("disk full")

    monkeypatch.setattr(TrainerState, "model_dump_json", fail)
    with pytest.raises(OSError, match="disk full"):
        write_checkpoint(tmp_path / "4", checkpoint, model.adapter_config(LORA))
    assert list(tmp_path.iterdir()) == []


def test_existing_version_is_never_overwritten(tmp_path: Path, model: PolicyModel, checkpoint: Checkpoint) -> None:
    (tmp_path / "4").mkdir()
    with pytest.raises(FileExistsError):
        write_checkpoint(tmp_path / "4", checkpoint, model.adapter_config(LORA))
    assert list((tmp_path / "4").iterdir()) == []


def test_unknown_format(tmp_path: Path, model: PolicyModel, checkpoint: Checkpoint) -> None:
    newer = Checkpoint(checkpoint.weights, checkpoint.optimizer, STATE.model_copy(update={"format": 2}))
    write_checkpoint(tmp_path / "4", newer, model.adapter_config(LORA))
    with pytest.raises(ValueError, match="p@4 was written in format 2"):
        read_checkpoint(tmp_path / "4")


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)
