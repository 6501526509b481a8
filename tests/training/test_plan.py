from __future__ import annotations

import math
from pathlib import Path

import pytest

from langgraph_art.protocol import TrainConfig
from langgraph_art_server.training.plan import Plan, plan_update
from langgraph_art_server.training.task import PolicyTask, TaskCall, TaskGroup, TrainTask

from .tasks import call, group, policy_task, train_task

UNSCALED = TrainConfig(scale="none")


def plan(*groups: TaskGroup, config: TrainConfig = UNSCALED) -> Plan:
    task = policy_task(list(groups), Path("unused"))
    return plan_update(task, config, vocabulary=100, token_budget=1000)


def coefficients(result: Plan) -> list[float]:
    return sorted(value for pack in result.packs for value in pack.entry_coefficients.tolist())


def test_every_run_counts_equally() -> None:
    """Run 0 has two calls and five tokens, run 1 one call and one token; their advantages are 1/2 and -1/2."""
    result = plan(group((1.0, [call([1], [2, 3]), call([1, 2], [3, 4, 5])]), (0.0, [call([1], [9])])))
    assert (len(result.run_ids), result.calls, result.trained_tokens) == (2, 3, 6)
    assert coefficients(result) == pytest.approx([-1 / (2 * 1) / 2] + [1 / (2 * 5) / 2] * 5)


def test_run_without_advantage_counts_but_is_not_computed() -> None:
    result = plan(group((1.0, [call([1], [2])]), (0.5, [call([1, 50, 51, 52], [3])]), (0.0, [call([1], [4])])))
    assert (len(result.run_ids), result.calls, result.trained_tokens) == (3, 3, 3)
    assert coefficients(result) == pytest.approx([-1 / 3 / 2, 1 / 3 / 2])
    assert [pack.token_ids.tolist() for pack in result.packs] == [[1]]


def test_run_without_calls_counts_in_the_mean_only() -> None:
    result = plan(group((1.0, [call([1], [2])]), (0.0, [call([1], [3])]), (5.0, [])))
    assert len(result.run_ids) == 2
    assert coefficients(result) == pytest.approx([-2 / 2, -1 / 2])


def test_groups_without_signal_are_counted_and_leave_the_weights_alone() -> None:
    result = plan(
        group((1.0, [call([1], [2])]), (0.0, [call([1], [3])])),
        group(*[(0.1, [call([1], [4])])] * 3),
        group((1.0, [call([1], [5])])),
        # Rewards differ, but the only run that called this policy is an average one.
        group((1.0, []), (0.5, [call([1], [6])]), (0.0, [])),
        group((1.0, []), (0.0, [])),
    )
    assert result.skipped == {"group:no_signal": 2, "group:too_small": 1}
    assert len(result.run_ids) == 2
    assert coefficients(result) == pytest.approx([-1 / 2 / 2, 1 / 2 / 2])


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_nothing_to_do(scale: str) -> None:
    result = plan(group(*[(0.1, [call([1], [4])])] * 3), config=TrainConfig(scale=scale))
    assert result.packs == []
    assert len(result.run_ids) == 0
    assert result.skipped == {"group:no_signal": 1}
    assert result.metrics == {"reward_mean": pytest.approx(0.1), "reward_std": pytest.approx(0)}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (call([1, 100], [2]), "call:bad_ids"),
        (call([1], [2, -1]), "call:bad_ids"),
        (call([1], [2], logprobs=[-1.0, -1.0]), "call:bad_lengths"),
        (call([1], [2], logprobs=[]), "call:bad_lengths"),
        (call([1], [2], logprobs=[math.nan]), "call:bad_logprobs"),
        (call([1], [2], logprobs=[-math.inf]), "call:bad_logprobs"),
        (call([1], []), "call:no_tokens"),
        (call([], [1]), "call:no_prompt"),
        (call([1], [2], temperature=0.0), "call:bad_temperature"),
        (call([1], [2], temperature=math.nan), "call:bad_temperature"),
    ],
)
def test_bad_calls_are_counted_and_take_no_weight(bad: TaskCall, reason: str) -> None:
    good = call([1], [2, 3])
    result = plan(group((1.0, [good, bad]), (0.0, [good])))
    assert result.skipped == {reason: 1}
    assert result.calls == 2
    assert coefficients(result) == pytest.approx([-1 / 2 / 4] * 2 + [1 / 2 / 4] * 2, rel=1e-12)


def test_group_left_with_bad_calls_only() -> None:
    result = plan(group((1.0, [call([1], [])]), (0.0, [call([1], [])])))
    assert result.packs == []
    assert result.skipped == {"call:no_tokens": 2}


def test_nan_survives_the_wire_as_null() -> None:
    task: PolicyTask = policy_task([group((1.0, [call([1], [2], logprobs=[math.nan])]), (0.0, []))], Path("x"))
    text = train_task(task).model_dump_json()
    assert "null" in text
    received = TrainTask.model_validate_json(text).policies[0]
    assert plan_update(received, UNSCALED, vocabulary=100, token_budget=9).skipped == {"call:bad_logprobs": 1}


def test_statistics() -> None:
    result = plan(group((1.0, [call([1], [2])]), (0.0, [call([1], [3])])), group((4.0, []), (4.0, [])))
    assert result.metrics == pytest.approx(
        {"reward_mean": 2.25, "reward_std": math.sqrt((1.25**2 + 2.25**2 + 2 * 1.75**2) / 4)}
        | {"advantage_mean": 0.0, "advantage_std": 0.5}
    )
