"""Scored groups to what the server is sent: structure and rewards, no messages and no tokens.

Invariant: every run of the groups is in the submission or counted under the reason why not; a run without a usable
reward is refused by name, never guessed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence

from pydantic import ValidationError

from langgraph_art.errors import ArtError, NothingToTrain, RewardError
from langgraph_art.protocol import CallClaim, GroupSubmission, RunSubmission, Submission, TrainConfig
from langgraph_art.runs import GraphRun, RunGroup

LEFT_OUT_INFRASTRUCTURE = "run:infrastructure_error"
"""Reason under which runs are counted that a submission leaves out, because no policy can cause their failure."""
LEFT_OUT_REWARD = "run:reward_error"
"""Reason under which runs are counted that a submission leaves out, because their reward could not be computed."""


def make_submission(
    groups: Sequence[RunGroup], *, config: TrainConfig | None = None, idempotency_key: str | None = None
) -> tuple[Submission, dict[str, int]]:
    """Turn scored groups into what the server is sent: structure and rewards, no messages and no tokens.

    Args:
        groups: groups whose runs have rewards. Runs with an infrastructure error are left out, whatever their reward,
            and so are runs whose reward could not be computed (``reward_error``).
        config: how to train; default: ``TrainConfig()``.
        idempotency_key: default: a hash of the run ids and the configuration, so sending the same runs again is safe.

    Returns:
        The submission, and the count of runs left out, by reason.

    Raises:
        RewardError: a run has no reward, or one that is not finite, its own or a node's.
        NothingToTrain: no run is left.
        ArtError: a run or call is in the groups more than once, or the idempotency key is empty or too long.
    """
    config = config or TrainConfig()
    kept = [(group, [run for run in group.runs if _left_out(run) is None]) for group in groups]
    skipped = dict(Counter(why for group in groups for run in group.runs if (why := _left_out(run)) is not None))
    if not any(runs for _, runs in kept):
        errors = [run.error for group in groups for run in group.runs if run.error is not None]
        last = f" The last one: {errors[-1].type}: {errors[-1].message}" if errors else ""
        failed, unscored = skipped.get(LEFT_OUT_INFRASTRUCTURE, 0), skipped.get(LEFT_OUT_REWARD, 0)
        why = f", and the reward of {unscored} could not be computed" if unscored else ""
        raise NothingToTrain(
            f"There is no run to train on: {failed} of {failed + unscored} runs failed for reasons outside the "
            f"policy{why}.{last}"
            if skipped
            else "There is no run to train on: the groups are empty. Roll out some inputs first."
        )
    submitted = [
        GroupSubmission(group_id=group.group_id, runs=[_submit_run(run, groups) for run in runs])
        for group, runs in kept
    ]
    if idempotency_key is None:
        identity = [[run.run_id for run in group.runs] for group in submitted], config.model_dump(mode="json")
        idempotency_key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    try:
        return Submission(idempotency_key=idempotency_key, groups=submitted, config=config), skipped
    except ValidationError as error:
        problems = "; ".join(": ".join([*map(str, problem["loc"]), problem["msg"]]) for problem in error.errors())
        raise ArtError(f"These groups cannot be submitted: {problems}") from error


def _left_out(run: GraphRun) -> str | None:
    """The reason why a run is not submitted, if there is one."""
    if run.error is not None and run.error.infrastructure:
        return LEFT_OUT_INFRASTRUCTURE
    return LEFT_OUT_REWARD if run.reward is None and run.reward_error is not None else None


def _submit_run(run: GraphRun, groups: Sequence[RunGroup]) -> RunSubmission:
    if run.reward is None or not math.isfinite(run.reward):
        what = "no reward" if run.reward is None else f"the reward {run.reward}"
        raise RewardError(
            f"Run {run.run_id} has {what}. Set run.reward to a finite number, or leave the run out of its group.",
            groups=list(groups),
        )
    for node, node_reward in run.node_rewards.items():
        if not math.isfinite(node_reward):
            raise RewardError(
                f"Run {run.run_id} has the reward {node_reward} at node {node!r}. Set node_rewards to finite numbers.",
                groups=list(groups),
            )
    claims = [
        CallClaim(call_id=call.call_id, node=call.node, delivered=call.delivered) for call in run.calls if call.art
    ]
    return RunSubmission(run_id=run.run_id, reward=run.reward, node_rewards=run.node_rewards, calls=claims)
