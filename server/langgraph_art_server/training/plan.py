"""From a policy's groups to packs: which calls train, with what weight and advantage, and what is left out and why.

Invariant: each call ends up in a pack, or has nothing to contribute, or is counted under exactly one reason (its own or
its group's). The plan depends on the task, the configuration and the token budget only.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from langgraph_art.protocol import TrainConfig
from langgraph_art_server.training.credit import call_advantages
from langgraph_art_server.training.nodes import weight_of
from langgraph_art_server.training.task import PolicyTask, TaskCall, TaskRun
from langgraph_art_server.training.tree import Pack, TreeCall, build_packs

MAX_LOGPROB = 1e-3
"""Behaviour logprobs are below 0, but for rounding."""


@dataclass(frozen=True)
class Plan:
    """What one policy's update will compute."""

    minibatches: list[list[Pack]]
    """The packs of each optimizer step."""
    run_ids: list[str]
    """Runs that the loss averages over: they made trainable calls, in a group with signal."""
    calls: int
    """Their trainable calls, with those whose advantage is zero."""
    trained_tokens: int
    """Sampled tokens of these calls."""
    skipped: Counter[str]
    """Count by reason: ``call:...`` for calls that cannot be trained on, ``group:...`` for groups, ``node:...`` for
    what could not be credited, ``minibatch:no_group`` for steps that had no group left."""
    metrics: dict[str, float]
    """Statistics of rewards and advantages."""

    @property
    def packs(self) -> list[Pack]:
        """All packs, in the order in which they are computed."""
        return [pack for packs in self.minibatches for pack in packs]


@dataclass(frozen=True)
class _Run:
    """A run that carries signal: its trainable calls, each with its advantage."""

    run_id: str
    calls: list[tuple[TaskCall, float]]

    @property
    def tokens(self) -> int:
        return sum(len(call.sampled_ids) for call, _ in self.calls)


def plan_update(task: PolicyTask, config: TrainConfig, *, vocabulary: int, token_budget: int) -> Plan:
    """Plans a policy's update.

    A call contributes if it has an advantage, or if a KL divergence, the entropy or what a teacher says of it gives its
    tokens a gradient all the same. A group with fewer than two runs is skipped as ``group:too_small``, one in which no
    call contributes as ``group:no_signal``. In the others, calls that do not contribute count in the weights (dropping
    them would let a vanishing advantage change those of all others) but are not computed.

    Args:
        task: The policy's groups. A run without calls still counts in its group's mean.
        config: How advantages, weights and minibatches are made.
        vocabulary: Token ids must be below this.
        token_budget: Tokens per pack, see :func:`build_packs`.

    Raises:
        ValueError: If a reward is not finite.
    """
    skipped: Counter[str] = Counter()
    groups = [
        group.model_copy(update={"runs": [_checked(run, vocabulary, skipped) for run in group.runs]})
        for group in task.groups
    ]
    credit, uncredited = call_advantages(groups, config)
    trained: list[list[_Run]] = []
    for group, advantages in zip(groups, credit, strict=True):
        if advantages is None:
            skipped["group:too_small"] += 1
            continue
        runs = [
            _Run(run.run_id, [(call, of_node[call.node]) for call in run.calls])
            for run, of_node in zip(group.runs, advantages, strict=True)
            if run.calls
        ]
        if any(_contributes(call, advantage, config) for run in runs for call, advantage in run.calls):
            trained.append(runs)
        elif runs:
            skipped["group:no_signal"] += 1
    steps = _split(trained, config.minibatches)
    if trained:
        skipped["minibatch:no_group"] += config.minibatches - len(steps)
    runs = [run for group in trained for run in group]
    calls = [call for run in runs for call, _ in run.calls]
    return Plan(
        minibatches=[build_packs(_weighted(step, config), token_budget) for step in steps],
        run_ids=[run.run_id for run in runs],
        calls=len(calls),
        trained_tokens=sum(run.tokens for run in runs),
        skipped=+(skipped + uncredited),
        metrics=_statistics("reward", [run.reward for group in task.groups for run in group.runs])
        | _statistics("advantage", [advantage for run in runs for _, advantage in run.calls])
        | (_statistics("staleness", [task.parent - call.version for call in calls]) if config.max_staleness else {}),
    )


def _split(groups: Sequence[list[_Run]], parts: int) -> list[list[_Run]]:
    """Deals groups into so many minibatches of runs, in their order and as evenly as whole groups allow."""
    bounds = [len(groups) * part // parts for part in range(parts + 1)]
    slices = [groups[start:end] for start, end in itertools.pairwise(bounds)]
    return [[run for group in part for run in group] for part in slices if part]


def _contributes(call: TaskCall, advantage: float, config: TrainConfig) -> bool:
    return bool(advantage or config.kl or config.entropy or (config.teacher and call.teacher_logprobs is not None))


def _weighted(runs: Sequence[_Run], config: TrainConfig) -> list[TreeCall]:
    """The calls of one optimizer step that contribute.

    With R runs, and T_i trained tokens of run i, a token of run i weighs

    - ``1 / (R * T_i)`` with ``"run"``: every run counts the same, however many calls and tokens it has;
    - ``1 / (T_1 + ... + T_R)`` with ``"token"`` (DAPO, https://arxiv.org/abs/2503.14476, equation 8);
    - ``1 / (R * constant_tokens)`` with ``"constant"`` (Dr. GRPO, https://arxiv.org/abs/2503.20783);

    times the weight of its node.
    """
    all_tokens = sum(run.tokens for run in runs)
    weighted = []
    for run in runs:
        if config.weight == "run":
            weight = 1 / (len(runs) * run.tokens)
        elif config.weight == "token":
            weight = 1 / all_tokens
        else:
            assert config.constant_tokens is not None  # the configuration requires it
            weight = 1 / (len(runs) * config.constant_tokens)
        weighted += [
            TreeCall(
                call.prompt_ids,
                call.sampled_ids,
                call.logprobs,
                call.temperature,
                advantage,
                weight * weight_of(call.node, config.node_weights),
                call.teacher_logprobs if config.teacher else None,
            )
            for call, advantage in run.calls
            if _contributes(call, advantage, config)
        ]
    return weighted


def _checked(run: TaskRun, vocabulary: int, skipped: Counter[str]) -> TaskRun:
    """The run with the calls that can be trained on; it still knows all nodes that it called."""
    calls = []
    for call in run.calls:
        problem = call_problem(call, vocabulary)
        if problem is None:
            calls.append(call)
        else:
            skipped[problem] += 1
    return run.model_copy(update={"calls": calls, "nodes": [*run.nodes, *(call.node for call in run.calls)]})


def call_problem(call: TaskCall, vocabulary: int) -> str | None:
    """Says why a call cannot be trained on, as a reason to count it under; ``None`` if it can."""
    if not call.sampled_ids:
        return "call:no_tokens"
    if not call.prompt_ids:
        return "call:no_prompt"
    if any(
        len(values) != len(call.sampled_ids) for values in (call.logprobs, call.teacher_logprobs) if values is not None
    ):
        return "call:bad_lengths"
    if not all(0 <= token < vocabulary for ids in (call.prompt_ids, call.sampled_ids) for token in ids):
        return "call:bad_ids"
    if not all(math.isfinite(logprob) and logprob <= MAX_LOGPROB for logprob in call.logprobs):
        return "call:bad_logprobs"
    if any(math.isinf(logprob) for logprob in call.teacher_logprobs or []):  # NaN says that there is none
        return "call:bad_logprobs"
    if not (math.isfinite(call.temperature) and call.temperature > 0):
        return "call:bad_temperature"
    return None


def _statistics(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}_mean": statistics.fmean(values), f"{name}_std": statistics.pstdev(values)}
