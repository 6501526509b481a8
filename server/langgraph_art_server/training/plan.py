"""From a policy's groups to packs: which calls train, with what weight and advantage, and what is left out and why.

Invariant: each call ends up in a pack, or has a zero advantage, or is counted under exactly one reason (its own or its
group's). The plan depends on the task and the token budget only.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass

from langgraph_art.protocol import TrainConfig
from langgraph_art_server.training.advantages import group_advantages
from langgraph_art_server.training.task import PolicyTask, TaskCall, TaskRun
from langgraph_art_server.training.tree import Pack, TreeCall, build_packs


@dataclass(frozen=True)
class Plan:
    """What one policy's update will compute."""

    packs: list[Pack]
    run_ids: list[str]
    """Runs that the loss averages over: they made trainable calls, in a group with signal."""
    calls: int
    """Their trainable calls, with those whose advantage is zero."""
    trained_tokens: int
    """Sampled tokens of these calls."""
    skipped: Counter[str]
    """Count by reason: ``call:...`` for calls that cannot be trained on, ``group:...`` for groups."""
    metrics: dict[str, float]
    """Statistics of rewards and advantages."""


def plan_update(task: PolicyTask, config: TrainConfig, *, vocabulary: int, token_budget: int) -> Plan:
    """Plans a policy's update.

    A trained token of run i weighs ``1 / (R * T_i)``: R is the number of runs that made trainable calls of this policy
    in a group with signal, T_i the run's trainable tokens. So every run counts equally, however many calls and tokens
    it has. A run whose own advantage is zero counts in R (dropping it would let a vanishing advantage change the
    weight of all others) but is not computed: its gradient is zero.

    A group with fewer than two runs is skipped as ``group:too_small``; one in which no run with trainable calls has an
    advantage as ``group:no_signal``. A group without any trainable call has nothing to skip.

    Args:
        task: The policy's groups. A run without calls still counts in its group's mean.
        config: ``scale`` decides what advantages are divided by.
        vocabulary: Token ids must be below this.
        token_budget: Tokens per pack, see :func:`build_packs`.

    Raises:
        ValueError: If a reward is not finite.
    """
    skipped: Counter[str] = Counter()
    advantages = group_advantages([[run.reward for run in group.runs] for group in task.groups], config.scale)
    trained: list[tuple[str, list[TaskCall], float]] = []
    for group, values in zip(task.groups, advantages, strict=True):
        if values is None:
            skipped["group:too_small"] += 1
            continue
        runs = [
            (run.run_id, _trainable(run, vocabulary, skipped), value)
            for run, value in zip(group.runs, values, strict=True)
        ]
        runs = [(run_id, calls, value) for run_id, calls, value in runs if calls]
        if any(value for _, _, value in runs):
            trained += runs
        elif runs:
            skipped["group:no_signal"] += 1

    tree_calls: list[TreeCall] = []
    for _, calls, advantage in trained:
        weight = 1 / (len(trained) * sum(len(call.sampled_ids) for call in calls))
        tree_calls += [
            TreeCall(call.prompt_ids, call.sampled_ids, call.logprobs, call.temperature, weight * advantage)
            for call in calls
            if advantage
        ]
    rewards = [run.reward for group in task.groups for run in group.runs]
    return Plan(
        packs=build_packs(tree_calls, token_budget),
        run_ids=[run_id for run_id, _, _ in trained],
        calls=sum(len(calls) for _, calls, _ in trained),
        trained_tokens=sum(len(call.sampled_ids) for _, calls, _ in trained for call in calls),
        skipped=skipped,
        metrics=_statistics("reward", rewards) | _statistics("advantage", [advantage for _, _, advantage in trained]),
    )


def _trainable(run: TaskRun, vocabulary: int, skipped: Counter[str]) -> list[TaskCall]:
    calls = []
    for call in run.calls:
        problem = call_problem(call, vocabulary)
        if problem is None:
            calls.append(call)
        else:
            skipped[problem] += 1
    return calls


def call_problem(call: TaskCall, vocabulary: int) -> str | None:
    """Says why a call cannot be trained on, as a reason to count it under; ``None`` if it can."""
    if not call.sampled_ids:
        return "call:no_tokens"
    if not call.prompt_ids:
        return "call:no_prompt"
    if len(call.logprobs) != len(call.sampled_ids):
        return "call:bad_lengths"
    if not all(0 <= token < vocabulary for ids in (call.prompt_ids, call.sampled_ids) for token in ids):
        return "call:bad_ids"
    if not all(math.isfinite(logprob) for logprob in call.logprobs):
        return "call:bad_logprobs"
    if not (math.isfinite(call.temperature) and call.temperature > 0):
        return "call:bad_temperature"
    return None


def _statistics(name: str, values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}_mean": statistics.fmean(values), f"{name}_std": statistics.pstdev(values)}
