"""Credit per node, by examples whose arithmetic is written beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langgraph_art.node_paths import matches
from langgraph_art.protocol import TrainConfig
from langgraph_art_server.training.advantages import group_advantages
from langgraph_art_server.training.credit import call_advantages
from langgraph_art_server.training.nodes import chosen, weight_of
from langgraph_art_server.training.task import TaskGroup, TaskRun

from .tasks import call

Run = tuple[float, dict[str, int], dict[str, float]]
"""Reward, number of calls by node, node rewards."""


def group(*runs: Run, untrained: Sequence[str] = ()) -> TaskGroup:
    return TaskGroup(
        group_id="g",
        runs=[
            TaskRun(
                run_id=str(index),
                reward=reward,
                node_rewards=node_rewards,
                nodes=[*counts],
                calls=[
                    call([1], [2], node=node)
                    for node, count in counts.items()
                    if node not in untrained
                    for _ in range(count)
                ],
            )
            for index, (reward, counts, node_rewards) in enumerate(runs)
        ],
    )


def credit(*groups: TaskGroup, **options: Any) -> tuple[list[Any], dict[str, int]]:
    advantages, skipped = call_advantages(groups, TrainConfig(**{"scale": "none"} | options))
    return advantages, dict(skipped)


def test_without_options_every_call_has_the_advantage_of_its_run() -> None:
    # Rewards 3, 0, 0 have the mean 1.
    runs = [(3.0, {"plan": 1, "write": 4}, {}), (0.0, {"plan": 2}, {}), (0.0, {}, {})]
    assert credit(group(*runs)) == ([[{"plan": 2.0, "write": 2.0}, {"plan": -1.0}, {}]], {})
    # Their deviation (ddof 1) is sqrt((4 + 1 + 1) / 2) = sqrt(3).
    ((first, second, _),), _ = credit(group(*runs), scale="group")
    assert first == pytest.approx(dict.fromkeys(("plan", "write"), 2 / (math.sqrt(3) + 1e-4)))
    assert second == pytest.approx({"plan": -1 / (math.sqrt(3) + 1e-4)})


def test_node_rewards_are_added_to_the_runs_advantage() -> None:
    """Three runs call ``draft`` once, five times and never: the mean is over the two runs, not over the six calls."""
    runs = [
        (1.0, {"draft": 1, "check": 1}, {"draft": 0.8, "check": 0.5}),
        (0.0, {"draft": 5, "check": 1}, {"draft": 0.2, "check": 0.1}),
        (0.5, {"check": 2}, {"check": 0.0}),
    ]
    # Graph: mean 0.5, so 0.5, -0.5, 0. draft: mean (0.8 + 0.2) / 2 = 0.5, so 0.3, -0.3.
    # check: mean (0.5 + 0.1 + 0) / 3 = 0.2, so 0.3, -0.1, -0.2. With lambda = 2:
    (advantages,), skipped = credit(group(*runs), node_advantage=2.0)
    assert advantages[0] == pytest.approx({"draft": 0.5 + 0.6, "check": 0.5 + 0.6})
    assert advantages[1] == pytest.approx({"draft": -0.5 - 0.6, "check": -0.5 - 0.2})
    assert advantages[2] == pytest.approx({"check": 0 - 0.4})
    assert skipped == {}


def test_the_scale_divides_the_graphs_term_only() -> None:
    runs = [(1.0, {"n": 1}, {"n": 0.5}), (0.0, {"n": 1}, {"n": 0.1})]
    # Graph: +-0.5 over a deviation of sqrt(0.25 + 0.25); node: 0.5 - 0.3 = 0.2.
    ((first, second),), _ = credit(group(*runs), scale="group", node_advantage=1.0)
    graph = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert (first["n"], second["n"]) == (pytest.approx(graph + 0.2), pytest.approx(-graph - 0.2))


def test_a_node_that_one_run_called_has_nothing_to_compare() -> None:
    runs = [(1.0, {"plan": 1, "fix": 3}, {"plan": 1.0, "fix": 9.0}), (0.0, {"plan": 1}, {"plan": 0.0})]
    # plan: +-0.5. fix: one run, so its node term is 0 and the graph's +-0.5 is left.
    assert credit(group(*runs), node_advantage=1.0) == (
        [[{"plan": 1.0, "fix": 0.5}, {"plan": -1.0}]],
        {"node:too_few_runs": 1},
    )


def test_a_run_without_a_node_reward() -> None:
    runs = [(1.0, {"n": 1}, {"n": 1.0}), (0.0, {"n": 1}, {}), (0.5, {"n": 1}, {"n": 0.0})]
    # Graph: 0.5, -0.5, 0. Node: over the two runs that have a reward, +0.5 and -0.5.
    expected = [[{"n": 1.0}, {"n": -0.5}, {"n": -0.5}]]
    assert credit(group(*runs), node_advantage=1.0) == (expected, {"node:no_reward": 1})
    # In a group where no run has one, there is none missing.
    assert credit(group((1.0, {"n": 1}, {}), (0.0, {"n": 1}, {})), node_advantage=1.0) == (
        [[{"n": 0.5}, {"n": -0.5}]],
        {},
    )


def test_agent_wise_compares_the_runs_that_called_the_node() -> None:
    runs = [(4.0, {"plan": 1, "fix": 2}, {}), (1.0, {"plan": 3, "fix": 1}, {}), (1.0, {"plan": 1}, {})]
    # plan: rewards 4, 1, 1 of all three have the mean 2. fix: rewards 4, 1 of two have the mean 2.5.
    assert credit(group(*runs), agent_wise=True) == (
        [[{"plan": 2.0, "fix": 1.5}, {"plan": -1.0, "fix": -1.5}, {"plan": -1.0}]],
        {},
    )
    # Deviations (ddof 1): plan sqrt((4 + 1 + 1) / 2) = sqrt(3), fix sqrt((2.25 + 2.25) / 1) = sqrt(4.5).
    ((first, _, _),), _ = credit(group(*runs), agent_wise=True, scale="group")
    assert first == pytest.approx({"plan": 2 / (math.sqrt(3) + 1e-4), "fix": 1.5 / (math.sqrt(4.5) + 1e-4)})


def test_agent_wise_in_a_batch() -> None:
    """The batch's deviation is that of the runs that called the node, in groups where at least two did."""
    first = group((4.0, {"fix": 1}, {}), (0.0, {"fix": 1}, {}), (9.0, {}, {}))
    second = group((2.0, {"fix": 1}, {}), (5.0, {}, {}))
    # fix: rewards 4, 0 deviate by sqrt((4 + 4) / 1) = sqrt(8); the second group has one run to compare.
    (of_first, of_second), skipped = credit(first, second, agent_wise=True, scale="batch")
    assert of_first[0]["fix"] == pytest.approx(2 / (math.sqrt(8) + 1e-4))
    assert of_second == [{"fix": 0.0}, {}]
    assert skipped == {"node:too_few_runs": 1}


def test_agent_wise_with_node_rewards() -> None:
    runs = [(4.0, {"fix": 1}, {"fix": 0.2}), (1.0, {"fix": 1}, {"fix": 0.6}), (1.0, {}, {})]
    # Graph at fix: 4 - 2.5 and 1 - 2.5. Node: 0.2 - 0.4 and 0.6 - 0.4, times 0.5.
    ((first, second, _),), _ = credit(group(*runs), agent_wise=True, node_advantage=0.5)
    assert (first["fix"], second["fix"]) == (pytest.approx(1.5 - 0.1), pytest.approx(-1.5 + 0.1))


def test_runs_whose_calls_are_not_trained_are_compared_too() -> None:
    """They called the node, at another policy or under a grammar; only their own calls have no advantage here."""
    rewarded = [(1.0, {"n": 1}, {"n": 1.0}), (0.0, {"n": 1}, {"n": 0.0})]
    trained, untrained = group(*rewarded).runs[0], group(*rewarded, untrained=["n"]).runs[1]
    mixed = TaskGroup(group_id="g", runs=[trained, untrained])
    assert credit(mixed, agent_wise=True, node_advantage=1.0) == ([[{"n": 1.0}, {}]], {})


def test_terms_that_cancel_leave_exactly_nothing() -> None:
    assert 0.1 + 0.2 - 0.3 != 0, "the example must be off by a rounding error"
    runs = [(0.6, {"n": 1}, {"n": 0.0}), (0.0, {"n": 1}, {"n": 0.1 + 0.1 + 0.2 + 0.2})]
    # Graph: 0.6 - 0.3 = 0.3. Node: 0 - 0.3. They cancel, but for the order in which floats were added.
    assert credit(group(*runs), node_advantage=1.0) == ([[{"n": 0.0}, {"n": 0.0}]], {})


def test_groups_under_two_runs() -> None:
    assert credit(group((1.0, {"n": 1}, {"n": 1.0})), group(), node_advantage=1.0, agent_wise=True) == (
        [None, None],
        {},
    )


def test_a_node_reward_that_is_not_finite() -> None:
    with pytest.raises(ValueError, match="not a finite number"):
        credit(group((1.0, {"n": 1}, {"n": math.nan}), (0.0, {"n": 1}, {"n": 1.0})), node_advantage=1.0)


small = st.integers(-3, 3).map(float)
run_of = st.tuples(
    small,
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 3), max_size=3),
    st.dictionaries(st.sampled_from("abc"), small, max_size=3),
)


@given(
    st.lists(st.lists(run_of, max_size=4), max_size=3),
    st.sampled_from(["none", "group", "batch"]),
    st.floats(0, 2),
    st.booleans(),
)
def test_against_the_formula_node_by_node(
    groups: list[list[Run]], scale: str, node_advantage: float, agent_wise: bool
) -> None:
    """Written again, naively: for one run and one node at a time, from all runs of the submission."""
    options = {"scale": scale, "node_advantage": node_advantage, "agent_wise": agent_wise}
    found, _ = credit(*(group(*runs) for runs in groups), **options)

    def deviation(rewards: list[float]) -> float:
        mean = sum(rewards) / len(rewards)
        return math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))

    for index, runs in enumerate(groups):
        assert (found[index] is None) == (len(runs) < 2)
        for number, (reward, counts, node_rewards) in enumerate(runs if len(runs) > 1 else []):
            assert found[index][number].keys() == counts.keys()
            for node, advantage in found[index][number].items():
                pools = [[r for r, c, _ in other if node in c or not agent_wise] for other in groups]
                term = 0.0
                if len(pools[index]) > 1:
                    term = reward - sum(pools[index]) / len(pools[index])
                    batch = [r for pool in pools if len(pool) > 1 for r in pool]
                    if scale != "none":
                        term /= deviation(batch if scale == "batch" else pools[index]) + 1e-4
                rewarded = [n[node] for _, c, n in runs if node in c and node in n]
                if node in node_rewards and len(rewarded) > 1:
                    term += node_advantage * (node_rewards[node] - sum(rewarded) / len(rewarded))
                assert advantage == pytest.approx(term, abs=1e-7)


def test_one_node_that_all_call_is_the_plain_advantage() -> None:
    rewards = [0.3, 0.1, 0.7]
    runs = group(*[(reward, {"n": 1}, {}) for reward in rewards])
    for scale in ("none", "group", "batch"):
        (plain,) = group_advantages([rewards], scale)
        (advantages,), _ = credit(runs, agent_wise=True, scale=scale)
        assert [of_run["n"] for of_run in advantages] == plain


# -- which nodes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("planner", ["planner", "planner|model", "planner|tools|model"]),
        ("model", ["planner|model", "planner|tools|model", "model"]),
        ("planner|model", ["planner|model"]),
        ("tools|model", ["planner|tools|model"]),
        ("plan*", ["planner", "planner|model", "planner|tools|model"]),
        ("planner|*", ["planner|model", "planner|tools|model"]),
        ("draft_?", ["draft_1", "draft_2"]),
        ("draft_[2-9]", ["draft_2"]),
        ("*", ["planner", "planner|model", "planner|tools|model", "model", "draft_1", "draft_2", ""]),
        ("", [""]),
        ("lanner", []),
        ("PLANNER", []),
    ],
)
def test_patterns(pattern: str, meant: list[str]) -> None:
    nodes = ["planner", "planner|model", "planner|tools|model", "model", "draft_1", "draft_2", ""]
    assert [node for node in nodes if matches(node, pattern)] == meant


def test_chosen_nodes_and_weights() -> None:
    assert chosen("anything", None)
    assert chosen("planner|model", ["writer", "planner"])
    assert not chosen("planner|model", [])
    weights = {"planner": 2.0, "planner|model": 0.5, "*": 3.0}
    assert [weight_of(node, weights) for node in ("planner|model", "planner|x", "y")] == [0.5, 2.0, 3.0]
    assert weight_of("y", {"planner": 2.0}) == 1.0
