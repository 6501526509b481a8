from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from langgraph_art.protocol import TrainConfig
from langgraph_art_server.training.plan import Plan, plan_update
from langgraph_art_server.training.task import PolicyTask, TaskCall, TaskGroup, TrainTask
from langgraph_art_server.training.tree import Pack

from .tasks import call, group, policy_task, train_task

UNSCALED = TrainConfig(scale="none")


def plan(*groups: TaskGroup, config: TrainConfig = UNSCALED) -> Plan:
    task = policy_task(list(groups), Path("unused"))
    return plan_update(task, config, vocabulary=100, token_budget=1000)


def coefficients(result: Plan) -> list[float]:
    """Weight times advantage of every entry."""
    return sorted(value for pack in result.packs for value in (pack.entry_weights * pack.entry_advantages).tolist())


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
        (call([1], [2], logprobs=[0.5]), "call:bad_logprobs"),
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


# -- weights ----------------------------------------------------------------------------------------------------------


def entries(packs: list[Pack]) -> dict[int, float]:
    """Weight by sampled token, which is unique in these examples."""
    weights: dict[int, float] = {}
    for pack in packs:
        tokens = pack.target_tokens[pack.entry_targets].tolist()
        assert not weights.keys() & {*tokens}
        weights |= dict(zip(tokens, pack.entry_weights.tolist(), strict=True))
    return weights


TWO_RUNS = group(
    (1.0, [call([1], [2, 3], node="plan"), call([1, 2], [4, 5, 6], node="write")]), (0.0, [call([1], [9], node="plan")])
)
"""Five trained tokens in the first run, one in the second."""


@pytest.mark.parametrize(
    ("options", "first", "second"),
    [
        ({"weight": "run"}, 1 / (2 * 5), 1 / (2 * 1)),
        ({"weight": "token"}, 1 / 6, 1 / 6),
        ({"weight": "constant", "constant_tokens": 20}, 1 / (2 * 20), 1 / (2 * 20)),
    ],
)
def test_weights(options: dict[str, Any], first: float, second: float) -> None:
    result = plan(TWO_RUNS, config=TrainConfig(scale="none", **options))
    assert entries(result.packs) == pytest.approx(dict.fromkeys([2, 3, 4, 5, 6], first) | {9: second})
    weighted = plan(TWO_RUNS, config=TrainConfig(scale="none", node_weights={"write": 0.5, "p*": 3}, **options))
    assert entries(weighted.packs) == pytest.approx(
        dict.fromkeys([2, 3], 3 * first) | dict.fromkeys([4, 5, 6], first / 2) | {9: 3 * second}
    )


def test_weights_of_a_node_leave_the_advantages_alone() -> None:
    result = plan(TWO_RUNS, config=TrainConfig(scale="none", node_weights={"write": 0.5}))
    advantages = [value for pack in result.packs for value in pack.entry_advantages.tolist()]
    assert sorted(advantages) == [-0.5] + [0.5] * 5


def pair(token: int, reward: float = 1.0) -> TaskGroup:
    """Two runs that sampled ``token`` and the next one."""
    return group((reward, [call([1], [token])]), (0.0, [call([1], [token + 1])]))


def test_minibatches_are_whole_groups_with_weights_of_their_own() -> None:
    groups = [pair(10), pair(20), pair(30, reward=0.0), pair(40), pair(50), pair(60)]
    result = plan(*groups, config=TrainConfig(scale="none", minibatches=2))
    # Five groups carry signal: two in the first step, three in the second, of four and six runs.
    first, second = [entries(packs) for packs in result.minibatches]
    assert first == pytest.approx(dict.fromkeys([10, 11, 20, 21], 1 / 4))
    assert second == pytest.approx(dict.fromkeys([40, 41, 50, 51, 60, 61], 1 / 6))
    assert result.packs == [*result.minibatches[0], *result.minibatches[1]]
    assert result.skipped == {"group:no_signal": 1}


def test_more_minibatches_than_groups() -> None:
    result = plan(pair(10), pair(20), config=TrainConfig(scale="none", minibatches=5))
    assert [entries(packs) for packs in result.minibatches] == [
        pytest.approx({10: 1 / 2, 11: 1 / 2}),
        pytest.approx({20: 1 / 2, 21: 1 / 2}),
    ]
    assert result.skipped == {"minibatch:no_group": 3}


# -- what has no advantage, and regularisers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "computed"),
    [
        ({}, [2, 4]),
        ({"kl": 0.1}, [2, 3, 4, 5, 6, 7]),
        ({"entropy": 0.01}, [2, 3, 4, 5, 6, 7]),
        ({"teacher": "t"}, [2, 3, 4, 5]),
    ],
)
def test_what_has_no_advantage_is_computed_for_its_regulariser_only(
    options: dict[str, Any], computed: list[int]
) -> None:
    """The teacher speaks of the calls that sampled 3 and 5, of which neither has an advantage."""
    signal = group((1.0, [call([1], [2])]), (0.5, [call([1], [3])]), (0.0, [call([1], [4])]))
    flat = group((0.5, [call([1], [5])]), (0.5, [call([1], [6])]), (0.5, [call([1], [7])]))
    if "teacher" in options:
        signal.runs[1].calls[0].teacher_logprobs = [-0.5]
        flat.runs[0].calls[0].teacher_logprobs = [math.nan]
    result = plan(signal, flat, config=TrainConfig(scale="none", **options))
    assert sorted(entries(result.packs)) == computed
    if options == {}:
        assert (result.skipped, len(result.run_ids)) == ({"group:no_signal": 1}, 3)
    else:
        assert (result.skipped, len(result.run_ids)) == ({}, 6)
        assert entries(result.packs) == pytest.approx(dict.fromkeys(computed, 1 / 6))


def test_the_teachers_logprobs_go_to_their_tokens() -> None:
    groups = pair(10)
    groups.runs[0].calls[0].teacher_logprobs = [-0.5]
    (pack,) = plan(groups, config=TrainConfig(scale="none", teacher="t")).packs
    assert [str(value) for value in pack.entry_teacher.tolist()] == ["-0.5", "nan"]
    (pack,) = plan(groups).packs
    assert pack.entry_teacher.isnan().all(), "without the option they are left alone"


@pytest.mark.parametrize(("given", "reason"), [([-1.0, -1.0], "call:bad_lengths"), ([-math.inf], "call:bad_logprobs")])
def test_a_teacher_that_talks_nonsense(given: list[float], reason: str) -> None:
    groups = pair(10)
    groups.runs[0].calls[0].teacher_logprobs = given
    assert plan(groups, config=TrainConfig(teacher="t")).skipped == {reason: 1}


def test_signal_is_a_matter_of_calls() -> None:
    """The graph's rewards are equal; what differs is how well one node did."""
    calls = [[call([1], [2], node="plan"), call([1], [token], node="write")] for token in (3, 4)]
    runs = group((1.0, calls[0]), (1.0, calls[1]))
    assert plan(runs).skipped == {"group:no_signal": 1}
    for run, reward in zip(runs.runs, (0.9, 0.1), strict=True):
        run.node_rewards = {"write": reward}
    result = plan(runs, config=TrainConfig(scale="none", node_advantage=1.0))
    # Two calls in each run, of which one has no advantage: it counts in the weights and is not computed.
    assert entries(result.packs) == pytest.approx({3: 1 / (2 * 2), 4: 1 / (2 * 2)})
    assert coefficients(result) == pytest.approx([-0.4 / 4, 0.4 / 4])
    assert (result.calls, result.trained_tokens, result.skipped) == (4, 4, {})


def test_a_bad_call_still_counts_as_a_visit_of_its_node() -> None:
    runs = group((1.0, [call([1], [2], node="n")]), (0.0, [call([], [3], node="n")]))
    result = plan(runs, config=TrainConfig(scale="none", agent_wise=True))
    assert coefficients(result) == pytest.approx([0.5])
    assert result.skipped == {"call:no_prompt": 1}


def test_staleness_is_measured_where_it_is_allowed() -> None:
    task = policy_task([pair(10)], Path("unused"), parent=3)
    task.groups[0].runs[0].calls[0].version = 1
    task.groups[0].runs[1].calls[0].version = 3
    result = plan_update(task, TrainConfig(max_staleness=2), vocabulary=100, token_budget=9)
    assert (result.metrics["staleness_mean"], result.metrics["staleness_std"]) == (1.0, 1.0)


def test_statistics() -> None:
    result = plan(group((1.0, [call([1], [2])]), (0.0, [call([1], [3])])), group((4.0, []), (4.0, [])))
    assert result.metrics == pytest.approx(
        {"reward_mean": 2.25, "reward_std": math.sqrt((1.25**2 + 2.25**2 + 2 * 1.75**2) / 4)}
        | {"advantage_mean": 0.0, "advantage_std": 0.5}
    )
