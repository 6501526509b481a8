"""Ready-made parts, each with an answer that is right and one that is not."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage

from langgraph_art.rewards import (
    BadReward,
    answer_of,
    cost_penalty,
    exact_match,
    from_evaluator,
    fuzzy_match,
    json_schema,
    latency,
    length_penalty,
    matches,
    sql_result,
    tokens,
    tool_called,
    tools_in_order,
)
from langgraph_art.runs import RunError

from .conftest import call, run

FAILED = RunError(type="ValueError", message="x", node=None, infrastructure=False)


def test_where_the_answer_is() -> None:
    chat = run()
    chat.output = {"messages": [HumanMessage("q"), AIMessage("the answer")]}
    assert answer_of(chat) == "the answer"
    assert answer_of(run("Rome"), "answer") == "Rome"
    with pytest.raises(BadReward, match="Its keys are: answer"):
        answer_of(run())
    with pytest.raises(BadReward, match="no key 'anwser'; its keys are: answer"):
        answer_of(run(), "anwser")


@pytest.mark.parametrize(
    ("part", "right", "wrong"),
    [
        (exact_match("expected", answer="answer"), " Paris\n", "paris"),
        (matches(r"P\w+s", answer="answer"), "Paris", "in Paris"),
        (matches("Par", answer="answer", whole=False), "in Paris", "Rome"),
        (json_schema({"type": "object", "required": ["a"]}, answer="answer"), '{"a": 1}', '{"b": 1}'),
        (json_schema({"type": "object"}, answer="answer"), {}, "{no json"),
    ],
)
def test_right_and_wrong_answers(part: Any, right: Any, wrong: Any) -> None:
    assert (part(run(right)), part(run(wrong))) == (1.0, 0.0)
    failed = run(right)
    failed.error, failed.output = FAILED, None
    assert part(failed) == 0.0


def test_likeness_is_graded() -> None:
    part = fuzzy_match("expected", answer="answer")
    assert part(run("PARIS")) == 1.0
    assert part(run("Pari")) == pytest.approx(8 / 9)
    assert part(run("xyz")) == 0.0


def test_tools() -> None:
    done = run(
        "a",
        call("planner", tools=(("search", {"q": "nile", "k": 3}),)),
        call("writer", "w", tools=(("save", {}), ("save", {}))),
    )
    assert tool_called("search", args={"q": "nile"})(done) == 1.0
    assert tool_called("search", args=lambda given: given["k"] > 3)(done) == 0.0
    assert tool_called("search", node="writer")(done) == 0.0
    assert tool_called("save", at_most=1)(done) == 0.0
    assert tool_called("drop", at_least=0, at_most=0)(done) == 1.0
    assert tools_in_order("search", "save", "save")(done) == 1.0
    assert tools_in_order("save", "search")(done) == 0.0


def test_tokens_time_and_money() -> None:
    done = run("a", call("planner", written=30), call("writer", written=50))
    assert (tokens()(done), tokens(node="writer")(done), latency(done)) == (-80.0, -50.0, -3.0)
    assert [length_penalty(free, free + 40)(done) for free in (80, 60, 10)] == [0.0, -0.5, -1.0]
    assert cost_penalty({"desk": (1.0, 10.0)}, per_unit=2.0)(done) == pytest.approx(-2 * (200 + 800) / 1e6)
    with pytest.raises(BadReward, match="no price for the model 'desk' of node 'planner'"):
        cost_penalty({})(done)
    done.calls[0].usage = None
    with pytest.raises(BadReward, match="reported no token usage"):
        tokens()(done)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as connection:
        connection.executescript("create table item(name, price); insert into item values ('a', 1), ('b', 2), ('b', 2)")
    return path


ENDLESS = "with recursive n(i) as (select 1 union all select i + 1 from n) select count(*) from n"


@pytest.mark.parametrize(
    ("query", "equal", "in_order"),
    [
        ("select name from item order by price", 1.0, 1.0),
        ("select name from item order by price desc", 1.0, 0.0),
        ("select distinct name from item", 0.0, 0.0),
        ("delete from item", 0.0, 0.0),
        ("attach 'other.db' as other", 0.0, 0.0),
        ("select nothing", 0.0, 0.0),
        (ENDLESS, 0.0, 0.0),
    ],
)
def test_sql(shop: Path, monkeypatch: pytest.MonkeyPatch, query: str, equal: float, in_order: float) -> None:
    monkeypatch.chdir(shop.parent)
    before = shop.read_bytes()
    graph_run = run(query, expected="select name from item order by price")
    for ordered, wanted in ((False, equal), (True, in_order)):
        assert sql_result(shop, "expected", answer="answer", ordered=ordered, seconds=0.3)(graph_run) == wanted
    assert sql_result(lambda: sqlite3.connect(shop), lambda r: "select 1", answer=lambda r: "select 1")(run()) == 1.0
    assert shop.read_bytes() == before
    assert [file.name for file in shop.parent.iterdir()] == ["shop.db"]


def test_a_wrong_reference_query_is_an_error(shop: Path) -> None:
    with pytest.raises(BadReward, match="the expected query fails: no such table"):
        sql_result(shop, "expected", answer="answer")(run("select 1", expected="select * from nowhere"))


def test_evaluators() -> None:
    def both(*, inputs: Any, outputs: Any, reference_outputs: Any) -> list[dict[str, Any]]:
        assert inputs["question"].startswith("capital")
        return [
            {"key": "exact", "score": outputs == reference_outputs, "comment": None},
            {"key": "brief", "score": 0.5, "comment": "short"},
        ]

    async def later(**given: Any) -> Any:
        return both(**given)

    for evaluator in (both, later):
        reward = from_evaluator(evaluator, outputs="answer", reference_outputs="expected")
        score = asyncio.run(reward(run()))  # type: ignore[arg-type]
        assert score.reward == {"exact": 1.0, "brief": 0.5}
        assert score.info == {"comments": {"brief": "short"}}
    with pytest.raises(BadReward, match="where a dict with key and score is needed"):
        asyncio.run(from_evaluator(lambda **given: 1.0, outputs="answer")(run()))  # type: ignore[arg-type]


def test_the_real_openevals() -> None:
    exact = pytest.importorskip("openevals.exact")
    reward = from_evaluator(exact.exact_match, outputs="answer", reference_outputs="expected")
    assert asyncio.run(reward(run())).reward == {"exact_match": 1.0}  # type: ignore[arg-type]
    assert asyncio.run(reward(run("Rome"))).reward == {"exact_match": 0.0}  # type: ignore[arg-type]


def test_the_real_agentevals() -> None:
    match = pytest.importorskip("agentevals.trajectory.match")
    evaluator = match.create_trajectory_match_evaluator(trajectory_match_mode="strict")
    done = run(expected=[HumanMessage("q"), AIMessage("a")])
    done.output = {"messages": [HumanMessage("q"), AIMessage("other words")]}
    reward = from_evaluator(evaluator, outputs="messages", reference_outputs="expected")
    assert list(asyncio.run(reward(done)).reward.values()) == [1.0]  # type: ignore[arg-type, union-attr]
    done.output["messages"].pop()
    assert list(asyncio.run(reward(done)).reward.values()) == [0.0]  # type: ignore[arg-type, union-attr]
