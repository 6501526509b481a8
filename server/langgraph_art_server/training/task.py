"""What the API process asks of the trainer worker, and what comes back: plain data that could cross machines.

Invariant: a task holds everything that decides its result (tokens, rewards, parent checkpoint, configuration), so a
retry of the same task on the same machine gives the same bytes. Messages are JSON lines; nothing is pickled.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, TypeAdapter

from langgraph_art.protocol import LoraConfig, Message, PolicyUpdate, SftConfig, TrainConfig


def _number(value: object) -> object:
    """JSON has no NaN; pydantic writes it as ``null``. The trainer is to count such a call, not to refuse the task."""
    return float("nan") if value is None else value


def _numbers(values: object) -> object:
    return [_number(value) for value in values] if isinstance(values, list) else values


class TaskCall(Message):
    """One trainable call of one policy."""

    call_id: str
    node: str
    prompt_ids: list[int]
    sampled_ids: list[int]
    logprobs: Annotated[list[float], BeforeValidator(_numbers)]
    """Behaviour logprob of each sampled id."""
    temperature: Annotated[float, BeforeValidator(_number)]
    """Sampling temperature; the trainer divides its logits by it."""
    version: int
    """Version of the policy that sampled it."""
    teacher_logprobs: Annotated[list[float], BeforeValidator(_numbers)] | None = None
    """The teacher's logprob of each sampled id, at the same temperature; ``None`` where none was asked."""


class TaskRun(Message):
    """The calls that one run made to one policy. ``calls`` may be empty: the reward still counts in the group."""

    run_id: str
    reward: float
    node_rewards: dict[str, float] = Field(default_factory=dict)
    """Mean reward of the run at each node path that has one."""
    nodes: list[str] = Field(default_factory=list)
    """Paths of all nodes at which it made calls, those of other policies and those that are not trained included."""
    calls: list[TaskCall]


class TaskGroup(Message):
    """Runs of the same input."""

    group_id: str
    runs: list[TaskRun]


class Lineage(Message):
    """A policy, the version that it is trained from, and the one that it becomes."""

    policy: str
    lora: LoraConfig
    parent: int
    parent_dir: str | None
    """Directory of the parent's checkpoint; ``None`` when the parent is version 0, which is made from the seed."""
    version: int
    """Number of the new version."""
    out_dir: str
    """Directory to write the new checkpoint into; it does not exist yet and is unique to this attempt."""


class PolicyTask(Lineage):
    """The update of one policy."""

    reference_dir: str | None = None
    """Directory of the version that the KL divergence is measured to; ``None`` means the base model."""
    groups: list[TaskGroup]


class TrainTask(Message):
    """One submission, joined with its tokens."""

    kind: Literal["train"] = "train"
    task_id: str
    config: TrainConfig
    token_budget: int | None = None
    """Tokens per pack; ``None`` leaves it to the worker. With ``checkpointing`` it decides the packing plan, so the
    server stores both with the job before it sends the task, and a retry has the same ones."""
    checkpointing: bool | None = None
    """Whether activations are computed again in the backward pass; ``None`` leaves it to the worker."""
    policies: list[PolicyTask]


class SftSequence(Message):
    """One answer to learn, with what it answers."""

    prompt_ids: list[int]
    answer_ids: list[int]
    """All of them are trained, the end token included."""


class SftTask(Message):
    """One supervised fine-tuning of one policy."""

    kind: Literal["sft"] = "sft"
    task_id: str
    config: SftConfig
    token_budget: int | None = None
    """As in :class:`TrainTask`."""
    checkpointing: bool | None = None
    """As in :class:`TrainTask`."""
    policy: Lineage
    examples: list[SftSequence]


TASK: TypeAdapter[TrainTask | SftTask] = TypeAdapter(Annotated[TrainTask | SftTask, Field(discriminator="kind")])
"""Reads either kind of task."""


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


class BackOff(Message):
    """Memory ran out; nothing of the task may be used. The same task may fit with this plan, once that is stored."""

    kind: Literal["back_off"] = "back_off"
    task_id: str
    token_budget: int
    checkpointing: bool


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
    token_budget: int
    """Tokens per pack that should fit into the memory that is free; the plan of a job that has none yet."""
    checkpointing: bool
    """Whether that budget counts on gradient checkpointing."""
