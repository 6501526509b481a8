"""Short ways to write tasks in tests."""

from __future__ import annotations

from pathlib import Path

from langgraph_art.protocol import LoraConfig, TrainConfig
from langgraph_art_server.training.task import PolicyTask, TaskCall, TaskGroup, TaskRun, TrainTask

LORA = LoraConfig(rank=3, alpha=6, seed=5)


def call(
    prompt: list[int],
    sampled: list[int],
    *,
    node: str = "agent",
    logprobs: list[float] | None = None,
    temperature: float = 1.0,
) -> TaskCall:
    return TaskCall(
        call_id="c",
        node=node,
        prompt_ids=prompt,
        sampled_ids=sampled,
        logprobs=[-1.0] * len(sampled) if logprobs is None else logprobs,
        temperature=temperature,
        version=0,
    )


def group(*runs: tuple[float, list[TaskCall]]) -> TaskGroup:
    return TaskGroup(
        group_id="g",
        runs=[TaskRun(run_id=str(index), reward=reward, calls=calls) for index, (reward, calls) in enumerate(runs)],
    )


def policy_task(
    groups: list[TaskGroup], root: Path, *, policy: str = "p", parent: int = 0, lora: LoraConfig = LORA
) -> PolicyTask:
    return PolicyTask(
        policy=policy,
        lora=lora,
        parent=parent,
        parent_dir=str(root / f"{policy}-{parent}") if parent else None,
        version=parent + 1,
        out_dir=str(root / f"{policy}-{parent + 1}"),
        groups=groups,
    )


def train_task(*policies: PolicyTask, config: TrainConfig | None = None, task_id: str = "t") -> TrainTask:
    return TrainTask(task_id=task_id, config=config or TrainConfig(), policies=list(policies))
