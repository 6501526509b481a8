"""A policy version on disk: a PEFT folder that vLLM loads, with the optimizer's state beside the weights.

Invariant: a version's directory either exists whole and durable or not at all: files are written to a temporary
directory beside it, synced, and renamed. Tensors are safetensors, the rest is JSON; nothing is pickled. The same
content gives the same bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from langgraph_art.protocol import LoraConfig, Message, SftConfig, TrainConfig
from langgraph_art_server.training.task import Lineage

ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"
STATE = "trainer_state.json"


class TrainerState(Message):
    """What a version records of its making, beside its tensors."""

    format: int = 1
    policy: str
    version: int
    parent: int
    step: int
    """Optimizer steps that the moments stand for: those since version 0, or since the last fine-tuning."""
    lora: LoraConfig
    config: TrainConfig | SftConfig
    """The configuration of the last step."""


@dataclass(frozen=True)
class Checkpoint:
    """A version, in memory."""

    weights: dict[str, Tensor]
    """Adapter weights by their names in a PEFT folder."""
    optimizer: dict[str, Tensor]
    """Optimizer moments: ``<weight>.exp_avg`` and ``<weight>.exp_avg_sq``. Empty after supervised fine-tuning, whose
    gradients say nothing about those of RL: the next update starts with moments of zero."""
    state: TrainerState


def write_checkpoint(directory: Path, checkpoint: Checkpoint, adapter: peft.LoraConfig) -> None:
    """Writes a version.

    Args:
        directory: Directory of the version; must not exist.
        checkpoint: What to write.
        adapter: PEFT's description of the adapter. Its base model is left out: it would be a path on this machine.

    Raises:
        FileExistsError: If the directory exists.
    """
    if directory.exists():
        raise FileExistsError(f"the directory of the new version exists already: {directory.name}")
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))
    try:
        save_file(_on_cpu(checkpoint.weights), temporary / ADAPTER, metadata={"format": "pt"})
        save_file(_on_cpu(checkpoint.optimizer), temporary / OPTIMIZER, metadata={"format": "pt"})
        described: dict[str, Any] = adapter.to_dict() | {"base_model_name_or_path": None, "inference_mode": True}
        text = json.dumps(described, indent=2, sort_keys=True, default=sorted)  # PEFT keeps module names in a set
        (temporary / ADAPTER_CONFIG).write_text(text)
        (temporary / STATE).write_text(checkpoint.state.model_dump_json(indent=2))
        for path in [*sorted(temporary.iterdir()), temporary]:
            # The engine, which may run as another user, reads it; both mkdtemp and safetensors make things private.
            path.chmod(0o755 if path.is_dir() else 0o644)
            _sync(path)
        temporary.rename(directory)
        _sync(directory.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def read_checkpoint(directory: Path) -> Checkpoint:
    """Reads a version that :func:`write_checkpoint` wrote.

    Raises:
        FileNotFoundError: If the directory or one of its files is missing.
        ValueError: If the state is of another format.
    """
    state = TrainerState.model_validate_json((directory / STATE).read_bytes())
    if state.format != TrainerState.model_fields["format"].default:
        raise ValueError(f"{state.policy}@{state.version} was written in format {state.format}, which is unknown here")
    return Checkpoint(load_file(directory / ADAPTER), load_file(directory / OPTIMIZER), state)


def read_parent(task: Lineage) -> Checkpoint | None:
    """Reads the version that a task trains from; ``None`` for version 0, which is made from the policy's seed.

    Raises:
        FileNotFoundError: If the directory or one of its files is missing.
        ValueError: If the checkpoint is not that of the task's policy, version and adapter.
    """
    if task.parent_dir is None:
        if task.parent != 0:
            raise ValueError(
                f"{task.policy}@{task.parent} has no checkpoint directory; only version 0 is made from seed"
            )
        return None
    parent = read_checkpoint(Path(task.parent_dir))
    expected, found = (
        (task.policy, task.parent, task.lora),
        (parent.state.policy, parent.state.version, parent.state.lora),
    )
    if expected != found:
        raise ValueError(f"the parent's checkpoint does not belong to the task: expected {expected}, found {found}")
    return parent


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in tensors.items()}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
