"""Joins a submission (structure and rewards) with the call store (tokens) into tasks for the worker.

Invariant: a call trains only if its answer reached the graph and the record says that it can be trained on; everything
left out is counted with its reason.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from langgraph_art.protocol import CallClaim, RecordedCall, RunSubmission, Submission
from langgraph_art_server.training.task import TaskCall, TaskGroup, TaskRun


@dataclass
class Joined:
    """Groups by policy, ready to train, and what was left out."""

    groups: dict[str, list[TaskGroup]] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)


def join(
    submission: Submission,
    records: dict[str, list[RecordedCall]],
    versions: dict[str, int],
    already_trained: set[tuple[str, str]],
) -> Joined:
    """Sort the calls of a submission by policy.

    Args:
        submission: Groups of scored runs.
        records: Recorded calls by call id.
        versions: Version that is about to be trained, by policy. Calls of another version are not on-policy.
        already_trained: Runs trained before, as (run id, policy).

    Returns:
        For every policy the groups in which at least one run has a trainable call. A run without one stays in its
        group: its reward is part of the group's mean.
    """
    joined = Joined()
    for group in submission.groups:
        runs_by_policy: dict[str, dict[str, list[TaskCall]]] = defaultdict(dict)
        excluded: set[tuple[str, str]] = set()
        for run in group.runs:
            for policy, calls in _calls_of(run, records, versions, joined.skipped).items():
                if (run.run_id, policy) in already_trained:
                    joined.skipped["run:already_trained"] += 1
                    excluded.add((run.run_id, policy))
                else:
                    runs_by_policy[policy][run.run_id] = calls
        for policy, calls_by_run in runs_by_policy.items():
            runs = [
                TaskRun(run_id=run.run_id, reward=run.reward, calls=calls_by_run.get(run.run_id, []))
                for run in group.runs
                if (run.run_id, policy) not in excluded
            ]
            joined.groups.setdefault(policy, []).append(TaskGroup(group_id=group.group_id, runs=runs))
    return joined


def _calls_of(
    run: RunSubmission, records: dict[str, list[RecordedCall]], versions: dict[str, int], skipped: Counter[str]
) -> dict[str, list[TaskCall]]:
    calls: dict[str, list[TaskCall]] = defaultdict(list)
    for claim in run.calls:
        found = records.get(claim.call_id)
        if not found:
            skipped["call:not_recorded"] += 1
            continue
        record, reason = _trainable(run, claim, found, versions)
        skipped["call:retried"] += len({other.attempt for other in found}) - 1
        skipped["call:unused_choice"] += sum(other.choice > 0 for other in found)
        if reason is not None:
            skipped[f"call:{reason}"] += 1
            continue
        assert record.policy is not None  # otherwise the record is untrainable
        calls[record.policy].append(
            TaskCall(
                call_id=record.call_id,
                node=claim.node,
                prompt_ids=record.prompt_ids,
                sampled_ids=record.sampled_ids,
                logprobs=record.logprobs,
                temperature=_number(record.sampling.get("temperature", 1.0)),
            )
        )
    for key in [key for key, count in skipped.items() if not count]:
        del skipped[key]
    return calls


def _trainable(
    run: RunSubmission, claim: CallClaim, found: list[RecordedCall], versions: dict[str, int]
) -> tuple[RecordedCall, str | None]:
    """The record whose answer reached the graph, and why it cannot train, if it cannot."""
    # An SDK that retries takes the answer of its last attempt; LangChain hands on the first choice.
    record = max((record for record in found if record.choice == 0), key=lambda record: record.attempt)
    if not claim.delivered:
        return record, "not_delivered"
    if record.run_id != run.run_id:
        return record, "of_another_run"
    if record.untrainable is not None:
        return record, record.untrainable
    if record.policy is not None and record.version != versions.get(record.policy):
        return record, "stale_version"
    return record, None


def _number(value: object) -> float:
    # The gateway checked it against the engine, which refuses anything but a number.
    return float(str(value))
