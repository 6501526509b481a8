"""What the API process asks of the trainer worker, and what comes back: plain data that could cross machines.

Invariant: a task holds everything that decides its result (tokens, rewards, parent checkpoint, configuration), so a
retry of the same task on the same machine gives the same bytes. Messages are JSON lines; nothing is pickled.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from langgraph_art.protocol import LoraConfig, Message, PolicyUpdate, TrainConfig


def _numbers(values: object) -> object:
    """JSON has no NaN; pydantic writes it as ``null``. The trainer is to count such a call, not to refuse the task."""
    return [float("nan") if value is None else value for value in values] if isinstance(values, list) else values


class TaskCall(Message):
    """One trainable call of one policy."""

    call_id: str
    node: str
    prompt_ids: list[int]
    sampled_ids: list[int]
    logprobs: Annotated[list[float], BeforeValidator(_numbers)]
    """Behaviour logprob of each sampled id."""
    temperature: float
    """Sampling temperature; the trainer divides its logits by it."""


class TaskRun(Message):
    """The calls that one run made to one policy. ``calls`` may be empty: the reward still counts in the group."""

    run_id: str
    reward: float
    calls: list[TaskCall]


class TaskGroup(Message):
    """Runs of the same input."""

    group_id: str
    runs: list[TaskRun]


class PolicyTask(Message):
    """The update of one policy."""

    policy: str
    lora: LoraConfig
    parent: int
    parent_dir: str | None
    """Directory of the parent's checkpoint; ``None`` when the parent is version 0, which is made from the seed."""
    version: int
    """Number of the new version."""
    out_dir: str
    """Directory to write the new checkpoint into; it does not exist yet and is unique to this attempt."""
    groups: list[TaskGroup]


class TrainTask(Message):
    """One submission, joined with its tokens."""

    kind: Literal["train"] = "train"
    task_id: str
    config: TrainConfig
    policies: list[PolicyTask]


class Progress(Message):
    """Packs computed so far, over all policies of the task."""

    kind: Literal["progress"] = "progress"
    task_id: str
    done: int
    total: int


class Trained(Message):
    """The task is done. A policy whose groups carried no signal has ``version == parent`` and wrote no checkpoint."""

    kind: Literal["trained"] = "trained"
    task_id: str
    updates: list[PolicyUpdate]
    run_ids: dict[str, list[str]]
    """By policy, the runs that the update averaged over."""
    skipped: dict[str, int]


class Failed(Message):
    """The task failed; nothing of it may be used."""

    kind: Literal["failed"] = "failed"
    task_id: str
    error: str
    """One line for people: what was wrong, with which policy, and what to do."""
    traceback: str
    retry: bool = False
    """Whether the same task may succeed later: the disk was full, say."""


class Ready(Message):
    """Sent once, when the base model is loaded and tasks are accepted."""

    kind: Literal["ready"] = "ready"
    device: Literal["cpu", "cuda"]
    parameters: int
    """Parameters of the base model."""
