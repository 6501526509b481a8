"""Joins a submission (structure and rewards) with the call store (tokens) into tasks for the worker.

Invariant: a call trains only if its answer reached the graph, the record says that it can be trained on, and the
configuration chooses it; everything left out is counted under one reason. An option that names a node or a policy that
the submission does not hold is counted too, and said in words.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from langgraph_art.node_paths import matches
from langgraph_art.protocol import CallClaim, RecordedCall, RunSubmission, Submission, TrainConfig
from langgraph_art_server.training.nodes import chosen
from langgraph_art_server.training.task import TaskCall, TaskGroup, TaskRun


@dataclass
class Joined:
    """Groups by policy, ready to train, and what was left out."""

    groups: dict[str, list[TaskGroup]] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)
    """Options without effect on this submission, in words."""


def join(
    submission: Submission,
    records: dict[str, list[RecordedCall]],
    versions: dict[str, int],
    already_trained: set[tuple[str, str]],
) -> Joined:
    """Sort the calls of a submission by policy.

    Args:
        submission: Groups of scored runs. Of its configuration, ``nodes``, ``truncated``, ``constrained``,
            ``max_staleness`` and a ``learning_rate`` by policy choose calls.
        records: Recorded calls by call id.
        versions: Version that is about to be trained, by policy; all policies of this base model.
        already_trained: Runs trained before, as (run id, policy).

    Returns:
        For every policy the groups in which at least one run has a trainable call. A run without one stays in its
        group: its reward is part of the group's mean.
    """
    joined = Joined()
    for group in submission.groups:
        if not any(run.calls for run in group.runs):
            joined.skipped["group:no_calls"] += 1
        runs_by_policy: dict[str, dict[str, list[TaskCall]]] = defaultdict(dict)
        excluded: set[tuple[str, str]] = set()
        for run in group.runs:
            joined.skipped["node:reward_without_call"] += len(
                run.node_rewards.keys() - {claim.node for claim in run.calls}
            )
            for policy, calls in _calls_of(run, submission.config, records, versions, joined.skipped).items():
                if (run.run_id, policy) in already_trained:
                    joined.skipped["run:already_trained"] += 1
                    excluded.add((run.run_id, policy))
                else:
                    runs_by_policy[policy][run.run_id] = calls
        for policy, calls_by_run in runs_by_policy.items():
            runs = [
                TaskRun(
                    run_id=run.run_id,
                    reward=run.reward,
                    node_rewards=run.node_rewards,
                    nodes=sorted({claim.node for claim in run.calls}),
                    calls=calls_by_run.get(run.run_id, []),
                )
                for run in group.runs
                if (run.run_id, policy) not in excluded
            ]
            joined.groups.setdefault(policy, []).append(TaskGroup(group_id=group.group_id, runs=runs))
    _check_options(submission, records, joined)
    joined.skipped = +joined.skipped
    return joined


def _calls_of(
    run: RunSubmission,
    config: TrainConfig,
    records: dict[str, list[RecordedCall]],
    versions: dict[str, int],
    skipped: Counter[str],
) -> dict[str, list[TaskCall]]:
    calls: dict[str, list[TaskCall]] = defaultdict(list)
    for claim in run.calls:
        found = records.get(claim.call_id, [])
        # An SDK that retries takes the answer of its last attempt; LangChain hands on the first choice.
        record = max((other for other in found if not other.choice), key=lambda other: other.attempt, default=None)
        skipped["call:unused_choice"] += sum(other.choice > 0 for other in found)
        if record is None:
            # Refused before anything was sampled, such as a prompt that is too long, or lost on its way here.
            skipped["call:not_recorded" if claim.delivered else "call:not_delivered"] += 1
            continue
        skipped["call:retried"] += len({other.attempt for other in found}) - 1
        reason = _why_not(run, claim, record, config, versions)
        if reason is not None:
            skipped[f"call:{reason}"] += 1
            continue
        assert record.policy is not None  # otherwise the record is untrainable
        assert record.version is not None
        calls[record.policy].append(
            TaskCall(
                call_id=record.call_id,
                node=claim.node,
                prompt_ids=record.prompt_ids,
                sampled_ids=record.sampled_ids,
                logprobs=record.logprobs,
                temperature=_number(record.sampling.get("temperature", 1.0)),
                version=record.version,
            )
        )
    return calls


def _why_not(
    run: RunSubmission, claim: CallClaim, record: RecordedCall, config: TrainConfig, versions: dict[str, int]
) -> str | None:
    """Why a call does not train; ``None`` if it does."""
    if not claim.delivered:
        return "not_delivered"
    if not chosen(claim.node, config.nodes):
        return "node_not_chosen"
    if record.run_id != run.run_id:
        return "of_another_run"
    if record.untrainable is not None and (record.untrainable, config.constrained) != ("constrained", "train"):
        return record.untrainable
    if record.policy not in versions:
        return "other_base_model"
    if isinstance(config.learning_rate, dict) and record.policy not in config.learning_rate:
        return "policy_not_chosen"
    if record.version is None or not 0 <= versions[record.policy] - record.version <= config.max_staleness:
        return "stale_version"
    if record.finish_reason == "length" and config.truncated == "skip":
        return "truncated"
    return None


def _check_options(submission: Submission, records: dict[str, list[RecordedCall]], joined: Joined) -> None:
    """Count and name what the configuration says about nodes and policies that are not there."""
    config = submission.config
    claims = [claim for group in submission.groups for run in group.runs for claim in run.calls]
    nodes = {claim.node for claim in claims}
    policies = {record.policy for claim in claims for record in records.get(claim.call_id, []) if record.policy}

    def warn(reason: str, text: str) -> None:
        joined.skipped[reason] += 1
        joined.warnings.append(text)

    trained = {node for node in nodes if chosen(node, config.nodes)}
    for option, patterns, there in (
        ("nodes", config.nodes or [], nodes),
        ("node_weights", config.node_weights, trained),
    ):
        for pattern in patterns:
            if not any(matches(node, pattern) for node in there):
                warn("option:no_such_node", f"{option}: {pattern!r} means none of the nodes {_listed(there)}")
    rates = config.learning_rate if isinstance(config.learning_rate, dict) else {}
    for option, names in (("learning_rate", rates), ("kl_reference", config.kl_reference)):
        for name in names:
            if name not in policies:
                warn("option:no_such_policy", f"{option}: {name!r} is none of the policies {_listed(policies)}")
    rewarded = any(run.node_rewards for group in submission.groups for run in group.runs)
    if rewarded != bool(config.node_advantage):
        what = "without it node rewards" if rewarded else "without node rewards it"
        warn("option:node_advantage", f"node_advantage is {config.node_advantage:g}: {what} cannot count")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "(there are none)"


def _number(value: object) -> float:
    try:
        return float(str(value))
    except ValueError:
        return math.nan  # no engine samples at that; the trainer counts it
