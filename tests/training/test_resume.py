"""A training whose worker is killed between and during updates ends with the bytes of one that was never disturbed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from langgraph_art.protocol import SftConfig, TrainConfig
from langgraph_art_server.training.checkpoint import read_checkpoint
from langgraph_art_server.training.task import Lineage, SftSequence, SftTask, TaskGroup, TrainTask

from .conftest import VOCABULARY
from .tasks import LORA, call, group, policy_task, train_task
from .test_worker import Worker

pytestmark = pytest.mark.slow

RL = TrainConfig(
    learning_rate=1e-2,
    schedule="cosine",
    warmup_steps=2,
    schedule_steps=8,
    minibatches=2,
    kl=0.1,
    kl_reference={"p": 1},
    weight_decay=0.1,
    max_grad_norm=0.05,
)
VERSIONS = range(1, 5)


def warm_up(root: Path) -> SftTask:
    policy = Lineage(policy="p", lora=LORA, parent=0, parent_dir=None, version=1, out_dir=str(root / "p-1"))
    examples = [SftSequence(prompt_ids=[1, number], answer_ids=[number + 1, 2]) for number in range(3, 12)]
    config = SftConfig(learning_rate=1e-2, epochs=2, batch_size=4, schedule="linear")
    return SftTask(task_id="1", config=config, token_budget=8, checkpointing=False, policy=policy, examples=examples)


def groups(seed: int) -> list[TaskGroup]:
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()

    return [group(*[(reward, [call([1, 4, number], tokens(6))]) for reward in (0.0, 0.5, 1.0)]) for number in range(8)]


def update(root: Path, version: int) -> TrainTask:
    """The RL update that makes a version, of two optimizer steps."""
    policy = policy_task(groups(version), root, parent=version - 1)
    policy.reference_dir = str(root / "p-1")
    task = train_task(policy, config=RL, task_id=str(version))
    return task.model_copy(update={"token_budget": 16, "checkpointing": False})


def files(root: Path) -> dict[str, bytes]:
    return {
        f"{version}/{path.name}": path.read_bytes()
        for version in VERSIONS
        for path in (root / f"p-{version}").iterdir()
    }


def test_killed_between_and_during_updates_it_ends_with_the_same_bytes(model_dir: Path, tmp_path: Path) -> None:
    steady, broken = tmp_path / "steady", tmp_path / "broken"
    for root in (steady, broken):
        root.mkdir()
    worker = Worker(model_dir, steady)
    for task in [warm_up(steady), *(update(steady, version) for version in VERSIONS[1:])]:
        assert worker.do(task.model_dump_json())[-1]["kind"] == "trained"
    worker.end()

    worker = Worker(model_dir, broken)
    assert worker.do(warm_up(broken).model_dump_json())[-1]["kind"] == "trained"
    assert worker.do(update(broken, 2).model_dump_json())[-1]["kind"] == "trained"
    worker.send(update(broken, 3).model_dump_json())
    progress = worker.receive()
    while progress["done"] < progress["total"] * 0.6:  # within the steps: the passes before them are over
        progress = worker.receive()
    assert progress["kind"] == "progress"
    worker.end()
    assert not (broken / "p-3").exists()
    worker = Worker(model_dir, broken)
    for version in VERSIONS[2:]:
        assert worker.do(update(broken, version).model_dump_json())[-1]["kind"] == "trained"
    worker.end()

    assert files(steady) == files(broken)
    states = [read_checkpoint(steady / f"p-{version}").state.step for version in VERSIONS]
    assert states == [0, 2, 4, 6], "two steps an update, counted from the fine-tuning"
