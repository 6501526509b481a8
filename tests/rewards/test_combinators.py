"""Combined rewards: their sums, their named parts, one failure in one run, groups beside single runs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langgraph_art.rewards import (
    AnyReward,
    BadReward,
    GroupReward,
    Score,
    at_least,
    clip,
    evaluate,
    gate,
    per_node,
    set_reward,
    weighted_sum,
)
from langgraph_art.runs import GraphRun

from .conftest import call, run


async def one(graph_run: GraphRun) -> float:
    return 1.0


class Ranks:
    """The n-th run of the group gets n."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def score_group(self, runs: Sequence[GraphRun], /) -> list[float]:
        self.seen.append(len(runs))
        return [float(place) for place in range(len(runs))]


def scored(reward: AnyReward, *runs: GraphRun) -> list[GraphRun]:
    for graph_run, value in zip(runs, asyncio.run(evaluate(reward, runs)), strict=True):
        if isinstance(value, Exception):
            graph_run.reward_error = str(value)
        else:
            set_reward(graph_run, value)
    return list(runs)


def test_a_weighted_sum_keeps_parts_nodes_and_explanations() -> None:
    style = lambda r: Score({"tone": 0.5, "form": 1}, nodes={"planner": 1.0}, info={"why": "fine"})  # noqa: E731
    (done,) = scored(weighted_sum({"right": one, "style": (0.5, style)}), run("a", call("planner")))
    assert done.reward_parts == {"right": 1.0, "style.tone": 0.25, "style.form": 0.5}
    assert (done.reward, done.node_rewards, done.reward_info) == (1.75, {"planner": 0.5}, {"style": {"why": "fine"}})


@given(st.dictionaries(st.text(min_size=1), st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=1))
def test_the_sum_is_that_of_its_parts(parts: dict[str, tuple[float, float]]) -> None:
    reward = weighted_sum({name: (weight, lambda r, value=value: value) for name, (weight, value) in parts.items()})
    (done,) = scored(clip(reward, -1.0, 1.0), run())
    assert done.reward is not None
    wanted = math.fsum(weight * value for weight, value in parts.values())
    assert done.reward == pytest.approx(min(max(wanted, -1.0), 1.0))
    assert math.fsum(done.reward_parts.values()) == pytest.approx(done.reward)


def test_clip_of_a_plain_number() -> None:
    (done,) = scored(clip(lambda r: 7), run())
    assert (done.reward, done.reward_parts) == (1.0, {})


def test_a_part_that_fails_is_named_and_marks_its_run_only() -> None:
    def picky(graph_run: GraphRun) -> float:
        if graph_run.output["answer"] == "bad":
            raise ZeroDivisionError("no words")
        return 1.0

    good, bad = scored(weighted_sum({"right": one, "picky": picky, "rank": Ranks()}), run("ok"), run("bad"))
    assert good.reward == 2.0
    assert (bad.reward, bad.reward_error) == (None, "part 'picky': ZeroDivisionError: no words")


def test_a_gate_asks_until_the_first_check_fails() -> None:
    asked: list[str] = []

    def check(name: str, wrong: str) -> Any:
        return lambda r: asked.append(name + r.output["answer"]) or r.output["answer"] != wrong

    ranks = Ranks()
    reward = gate({"form": check("form ", "a"), "facts": check("facts ", "b")}, ranks, failed=-1.0)
    assert isinstance(reward, GroupReward)
    a, b, c, d = scored(reward, *(run(answer) for answer in "abcd"))
    assert (a.reward, a.reward_parts, a.reward_info) == (-1.0, {"form": -1.0}, {"failed_check": "form"})
    assert (b.reward, b.reward_info) == (-1.0, {"failed_check": "facts"})
    assert (c.reward, d.reward) == (0.0, 1.0)
    assert ranks.seen == [2], "only runs that passed are compared"
    assert "facts a" not in asked


def test_a_graded_reward_as_a_check() -> None:
    near, far = scored(at_least(lambda r: float(r.output["answer"]), 0.5), run("0.5"), run("0.4"))
    assert (near.reward, far.reward) == (1.0, 0.0)


def test_rewards_of_nodes_see_their_calls_only() -> None:
    reward = per_node(one, {"writer": lambda r: len(r.calls), "planner": one})
    both, short = scored(reward, run("a", call("planner"), call("writer", "x"), call("writer", "y")), run("b"))
    assert (both.reward, both.node_rewards) == (1.0, {"writer": 2.0, "planner": 1.0})
    assert (short.reward, short.node_rewards) == (1.0, {}), "it called none of them"


def test_a_group_reward_of_the_wrong_length() -> None:
    class Short:
        def score_group(self, runs: Sequence[GraphRun], /) -> list[float]:
            return [1.0]

    values = asyncio.run(evaluate(Short(), [run(), run()]))
    assert all(isinstance(value, BadReward) and "1 rewards for 2 runs" in str(value) for value in values)


@pytest.mark.parametrize(
    "make",
    [
        lambda: weighted_sum({}),
        lambda: weighted_sum({"a": (math.nan, one)}),
        lambda: weighted_sum({"a": 1.0}),  # type: ignore[dict-item]
        lambda: clip(one, 1.0, 0.0),
        lambda: gate({}, one),
        lambda: per_node(one, {}),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        make()
