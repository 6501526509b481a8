"""What a saved run must keep: everything, exactly."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

import pandas
import polars
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolMessage
from langgraph.types import Command
from pydantic import BaseModel

from langgraph_art.errors import RunFileError
from langgraph_art.plain import from_plain, to_plain
from langgraph_art.protocol import RecordedCall
from langgraph_art.runs import (
    GraphRun,
    NodeCall,
    RunError,
    RunGroup,
    RunInterrupt,
    aattach_tokens,
    attach_tokens,
    load_runs,
    remove_run,
    save_runs,
)

NOW = datetime(2026, 3, 1, 12, 30, 15, 123456, tzinfo=UTC)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.just("$type"), inner, max_size=4)
    ),
    max_leaves=12,
)

atoms = st.none() | st.integers() | st.binary() | st.just(float("inf")) | st.text(max_size=3)
hashable = atoms | st.tuples(atoms, atoms) | st.frozensets(atoms, max_size=3)


def a_call(node: str = "planner|model", **fields: Any) -> NodeCall:
    message = HumanMessage("hi", id="h1").model_dump()
    return NodeCall(call_id="c1", node=node, model="desk", messages=[message], started_at=NOW, ended_at=NOW, **fields)


def a_run(**fields: Any) -> GraphRun:
    return GraphRun(run_id="r1", started_at=NOW, ended_at=NOW, **fields)


def through_file(run: GraphRun, folder: Path) -> GraphRun:
    save_runs(folder / "runs.jsonl", [run])
    (loaded,) = load_runs(folder / "runs.jsonl")
    return loaded


@given(value=json_values, output=json_values, kept=st.dictionaries(st.text(st.characters()), json_values, max_size=3))
@settings(max_examples=150, deadline=None)
def test_json_survives_saving_exactly(
    tmp_path_factory: pytest.TempPathFactory, value: Any, output: Any, kept: Any
) -> None:
    run = a_run(input=value, output=output, metadata=kept)
    loaded = through_file(run, tmp_path_factory.getbasetemp())
    assert loaded == run
    assert repr((loaded.input, loaded.output)) == repr((value, output))  # 1 is not 1.0, nor True


@given(
    value=st.recursive(
        hashable,
        lambda inner: st.tuples(inner) | st.lists(inner, max_size=3) | st.dictionaries(hashable, inner, max_size=3),
        max_leaves=6,
    )
)
@settings(deadline=None)
def test_other_builtin_values_survive_too(value: Any) -> None:
    assert from_plain(json.loads(json.dumps(to_plain(value)))) == value


texts = st.text(st.characters(), max_size=6)
tool_calls = st.lists(
    st.fixed_dictionaries({"name": texts, "args": st.dictionaries(texts, json_values, max_size=2), "id": texts}),
    max_size=2,
)
contents = texts | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=2)
messages = (
    st.builds(HumanMessage, contents, id=texts | st.none(), name=texts | st.none())
    | st.builds(SystemMessage, contents)
    | st.builds(AIMessage, contents, tool_calls=tool_calls, response_metadata=st.dictionaries(texts, json_values))
    | st.builds(ToolMessage, contents, tool_call_id=texts, status=st.sampled_from(["success", "error"]))
)
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in "ab"]
errors = (
    st.builds(RunError, type=texts, message=texts, node=texts | st.none(), infrastructure=st.booleans()) | st.none()
)
times = st.datetimes(timezones=st.just(UTC))
finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def graph_runs(draw: st.DrawFn) -> GraphRun:
    """Any run: calls whose messages come from one small pool, so that they share some and repeat others."""
    pool: list[AnyMessage] = draw(st.lists(messages, min_size=1, max_size=5))
    picked = st.sampled_from([message.model_dump() for message in pool])
    call = st.builds(
        NodeCall,
        call_id=texts,
        node=texts,
        model=texts,
        version=texts | st.none(),
        messages=st.lists(picked, max_size=6),
        response=picked | st.none(),
        tools=st.lists(st.sampled_from(TOOLS), max_size=2) | st.none(),
        usage=st.dictionaries(texts, st.integers(0, 10**6), max_size=2) | st.none(),
        finish_reason=texts | st.none(),
        started_at=times,
        ended_at=times | st.none(),
        error=errors,
        delivered=st.booleans(),
        art=st.booleans(),
    )
    pause = st.builds(
        RunInterrupt, id=texts, node=texts, value=json_values, at=times, answered=st.booleans(), answer=json_values
    )
    state = json_values | st.fixed_dictionaries({"messages": st.just(pool)})
    run = st.builds(
        GraphRun,
        run_id=texts,
        group_id=texts | st.none(),
        input=state,
        output=state,
        calls=st.lists(call, max_size=4),
        interrupts=st.lists(pause, max_size=2),
        error=errors,
        started_at=times,
        ended_at=times | st.none(),
        reward=finite | st.none(),
        reward_parts=st.dictionaries(texts, finite, max_size=2),
        node_rewards=st.dictionaries(texts, finite, max_size=2),
        metadata=st.dictionaries(texts, json_values, max_size=2),
    )
    return draw(run)


@given(runs=st.lists(graph_runs(), min_size=1, max_size=3))
@settings(max_examples=25, deadline=None)
def test_whole_runs_survive_saving(tmp_path_factory: pytest.TempPathFactory, runs: list[GraphRun]) -> None:
    path = tmp_path_factory.getbasetemp() / "whole.jsonl"
    save_runs(path, runs)
    loaded = load_runs(path)
    assert loaded == runs
    before = path.read_bytes()
    save_runs(path, loaded)
    assert path.read_bytes() == before  # 1 is not 1.0, nor True


def a_conversation(turns: int) -> GraphRun:
    """A run whose history grows: each call gets all that was said before."""
    said: list[dict[str, Any]] = [SystemMessage("be brief").model_dump()]
    calls = []
    for turn in range(turns):
        said.append(HumanMessage(f"question {turn}").model_dump())
        answer = AIMessage(f"answer {turn}", id=f"a{turn}")
        calls.append(a_call().model_copy(update={"messages": [*said], "response": answer.model_dump()}))
        said.append(answer.model_dump())  # equal to the answer, another object
    return a_run(calls=calls)


def test_a_growing_history_is_stored_once(tmp_path: Path) -> None:
    run = a_conversation(100)
    loaded = through_file(run, tmp_path)
    assert loaded == run
    record = json.loads((tmp_path / "runs.jsonl").read_text())
    assert len(record["messages"]) == 201
    assert record["calls"][1]["messages"] == [0, 1, 2, 3]
    assert record["calls"][1]["response"] == 4
    once = len(json.dumps(record["messages"]))
    assert (tmp_path / "runs.jsonl").stat().st_size < 4 * once, "each call's messages would take 100 times as much"
    assert loaded.calls[0].response is loaded.calls[99].messages[2], "nor are there copies in memory"


def test_version_1_is_still_read(tmp_path: Path) -> None:
    message, answer = HumanMessage("hi", id="h1").model_dump(), AIMessage("yes").model_dump()
    call = {
        "call_id": "c1", "node": "planner|model", "model": "desk", "version": "desk@3", "messages": [message],
        "response": answer, "usage": None, "finish_reason": "stop", "started_at": "2026-03-01T12:30:15.123456Z",
        "ended_at": None, "error": None, "delivered": True, "art": True, "tokens": None,
    }  # fmt: skip
    record = {
        "format": "langgraph-art.run", "version": 1, "run_id": "r1", "group_id": None, "calls": [call], "error": None,
        "started_at": "2026-03-01T12:30:15.123456Z", "ended_at": "2026-03-01T12:30:15.123456Z", "reward": 0.5,
        "reward_parts": {}, "input": {"$type": "message", "value": {"type": "human", "data": message}}, "output": None,
        "metadata": {},
    }  # fmt: skip
    path = tmp_path / "old.jsonl"
    path.write_text(json.dumps(record) + "\n")
    (loaded,) = load_runs(path)
    expected = a_call(version="desk@3", response=answer, finish_reason="stop", delivered=True, art=True)
    assert loaded.calls == [expected.model_copy(update={"ended_at": None})]
    assert (loaded.reward, loaded.input) == (0.5, HumanMessage("hi", id="h1"))


def test_messages_survive_with_everything_they_carry(tmp_path: Path) -> None:
    messages = [
        SystemMessage("be brief"),
        HumanMessage([{"type": "text", "text": "hi"}], id="h", name="ann"),
        AIMessage(
            "",
            id="a",
            tool_calls=[{"name": "f", "args": {"x": [1]}, "id": "t", "type": "tool_call"}],
            invalid_tool_calls=[{"name": "g", "args": "[1]", "id": "u", "error": "no", "type": "invalid_tool_call"}],
            usage_metadata={"input_tokens": 1, "output_tokens": 2, "total_tokens": 3},
            response_metadata={"model_name": "desk@3"},
        ),
        ToolMessage("4", tool_call_id="t", status="error", artifact={"raw": 4}),
    ]
    run = a_run(input={"messages": messages}, output={"messages": [*messages, AIMessage("done")]})
    loaded = through_file(run, tmp_path)
    assert loaded == run
    assert [type(message) for message in loaded.input["messages"]] == [type(message) for message in messages]


class Colour(Enum):
    RED = "red"


class Note(BaseModel):
    text: str
    said: list[Any]


@dataclass
class Point:
    x: int
    tags: set[str]


class Odd:
    def __str__(self) -> str:
        return "odd one"


def test_other_objects_become_plain_data_with_their_type(tmp_path: Path) -> None:
    note = Note(text="n", said=[HumanMessage("hi")])
    run = a_run(
        input={"note": note, "point": Point(1, {"a"}), "colour": Colour.RED, "odd": Odd()}, output=Command(resume=1)
    )
    loaded = through_file(run, tmp_path)
    here = __name__
    assert loaded.input["note"] == {"$type": f"{here}.Note", "value": {"text": "n", "said": [HumanMessage("hi")]}}
    assert loaded.input["point"] == {"$type": f"{here}.Point", "value": {"x": 1, "tags": {"a"}}}
    assert loaded.input["colour"] == {"$type": f"{here}.Colour", "value": "red"}
    assert loaded.input["odd"] == {"$type": f"{here}.Odd", "value": "odd one"}
    assert loaded.output["$type"] == "langgraph.types.Command"
    assert loaded.output["value"]["resume"] == 1
    again = through_file(loaded, tmp_path)
    assert again == loaded


def test_a_file_cannot_make_classes() -> None:
    hostile = {"$type": "os.system", "value": "true"}
    assert from_plain(hostile) == hostile


def test_a_state_that_contains_itself_is_cut() -> None:
    state: dict[str, Any] = {"name": "s"}
    state["self"] = state
    assert to_plain(state) == {"name": "s", "self": {"$type": "cycle", "value": None}}
    shared = [1]
    assert to_plain([shared, shared]) == [[1], [1]]


def test_calls_errors_and_tokens_survive(tmp_path: Path) -> None:
    tokens = RecordedCall(
        call_id="c1", attempt=1, choice=0, run_id="r1", node="planner|model", model="desk", policy="desk", version=3,
        status="complete", finish_reason="stop", sampling={"temperature": 1.0}, constrained=False, untrainable=None,
        prompt_ids=[1, 2], sampled_ids=[3], logprobs=[-0.25], created_at=NOW,
    )  # fmt: skip
    error = RunError(type="ValueError", message="bad", node="planner", infrastructure=False)
    answer = AIMessage("yes", id="a", additional_kwargs={"parsed": Note(text="n", said=[])}).model_dump()
    call = a_call(version="desk@3", response=answer, usage={"input_tokens": 2}, delivered=True, art=True, tokens=tokens)
    run = a_run(calls=[call, a_call(error=error)], error=error, reward=0.5, reward_parts={"brief": 0.5}, group_id="g")
    loaded = through_file(run, tmp_path)
    assert loaded == run
    assert loaded.calls[0].tokens == tokens
    assert loaded.seconds == 0.0


def test_a_run_is_removed_and_the_rest_stays_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    save_runs(path, [a_run(reward=1.0), a_run().model_copy(update={"run_id": "r2"}), a_run(reward=0.0)])
    line = path.read_bytes().splitlines(keepends=True)[1]
    assert remove_run(path, "r1") == 2
    assert path.read_bytes() == line
    before = path.stat().st_mtime_ns
    assert remove_run(path, "r") == 0
    assert path.stat().st_mtime_ns == before, "it was not written"
    with path.open("a") as file:
        file.write('{"run_id": "r1"\n')
    with pytest.raises(RunFileError, match="line 2"):
        remove_run(path, "r1")
    assert list(tmp_path.iterdir()) == [path]


def test_pandas_and_polars_open_runs_of_every_shape(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    parts = HumanMessage([{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "u"}}])
    calls = [a_call(usage={"input_tokens": 3}), a_call(response=AIMessage("yes").model_dump())]
    calls[1].messages = [parts.model_dump()]
    error = RunError(type="ValueError", message="bad", node="planner", infrastructure=False)
    pauses = [RunInterrupt(id="i", node="n", value=value, at=NOW) for value in ("why?", {"q": 1})]
    runs = [
        a_run(input="text", output={"messages": [parts]}, calls=calls, reward=1.0),
        a_run(input={"q": 1}, error=error, reward=0.5, interrupts=pauses),
        a_run(input=[1, 2], output=3.5, calls=[a_call(error=error)], metadata={"k": 1}),
    ]
    save_runs(path, runs * 50)
    table = pandas.read_json(path, lines=True)
    fields = {"node": polars.String, "messages": polars.List(polars.Int64), "response": polars.Int64}
    free = dict.fromkeys(["input", "output", "interrupts", "metadata"], polars.String)
    shape = {"reward": polars.Float64, "error": polars.Struct({"node": polars.String}), **free}
    shape |= {"messages": polars.List(polars.String), "calls": polars.List(polars.Struct(fields))}
    frame = polars.read_ndjson(path, schema=shape)
    for rows in (table.to_dict("records"), frame.to_dicts()):
        assert [row["reward"] for row in rows[:2]] == [1.0, 0.5]
        assert rows[1]["error"]["node"] == "planner"
        assert [len(row["calls"]) for row in rows[:3]] == [2, 0, 1]
        assert (rows[0]["calls"][1]["response"], rows[0]["calls"][1]["messages"]) == (2, [1])
    assert json.loads(frame["messages"][0][1])["content"][0]["text"] == "hi"
    assert json.loads(frame["interrupts"][1])[1]["value"] == {"q": 1}
    assert frame["input"].to_list()[:3] == ["text", '{"q": 1}', "[1, 2]"]


def test_several_runs_append_and_open_in_pandas(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    save_runs(path, [a_run(reward=1.0, calls=[a_call()], input={"q": "größe\u2028"}), a_run(reward=0.0)])
    save_runs(path, [a_run(reward=0.25)], append=True)
    assert [run.reward for run in load_runs(path)] == [1.0, 0.0, 0.25]
    frame = pandas.read_json(path, lines=True)
    assert list(frame["reward"]) == [1.0, 0.0, 0.25]
    assert frame["calls"][0][0]["node"] == "planner|model"
    assert list(tmp_path.iterdir()) == [path]


def test_saving_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    save_runs(path, [a_run(reward=1.0)])

    def broken() -> Any:
        yield a_run()
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        save_runs(path, broken())
    assert [run.reward for run in load_runs(path)] == [1.0]
    assert list(tmp_path.iterdir()) == [path]


BAD_CALL = (
    '"messages": [{}], "calls": [{"call_id": "c", "node": "", "model": "m", "started_at": "2026-03-01T12:00:00Z", '
    '"messages": [%d], "response": null, "tools": null}], "tools": []'
)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"format": "langgraph-art.run", "version": 1, "run_id"', "line 2: not valid JSON"),
        ('{"some": "thing"}', "line 2: not a graph run"),
        ("[1, 2]", "line 2: not a graph run"),
        ('{"format": "langgraph-art.run", "version": 99, "run_id": "r"}', r"line 2: format version 99.*Upgrade"),
        ('{"format": "langgraph-art.run", "version": 1, "calls": []}', "line 2: .*run_id"),
        ('{"format": "langgraph-art.run", "version": 1, "run_id": "r", "input": {"$type": "message"}}', "line 2: "),
        ('{"format": "langgraph-art.run", "version": 2, "run_id": "r"}', "line 2: 'messages'"),
        (
            f'{{"format": "langgraph-art.run", "version": 2, "run_id": "r", {BAD_CALL % 1}}}',
            "line 2: .*item 1 of a list of 1",
        ),
        (f'{{"format": "langgraph-art.run", "version": 2, "run_id": "r", {BAD_CALL % -1}}}', "line 2: .*item -1"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "runs.jsonl"
    save_runs(path, [a_run()])
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(RunFileError, match="(?s)" + says):
        load_runs(path)


def test_calls_are_found_by_name_path_and_part_of_it() -> None:
    run = a_run(calls=[a_call("planner|model"), a_call("writer|model"), a_call("planner|tools"), a_call("")])
    assert run.nodes == ["planner|model", "writer|model", "planner|tools", ""]
    assert run.calls_at("model") == run.calls[:2]
    assert run.calls_at("planner") == [run.calls[0], run.calls[2]]
    assert run.calls_at("planner|model") == run.calls[:1]
    assert run.calls_at("mod") == []
    assert run.calls_at("") == run.calls[3:]


def test_rewards_of_a_group() -> None:
    assert RunGroup(group_id="g", runs=[a_run(reward=1.0), a_run()]).rewards == [1.0, None]


class Recorded:
    """Stands in for the server: what it would answer, by run."""

    def __init__(self, *calls: tuple[str, int, int, str]) -> None:
        self.recorded = [
            RecordedCall(
                call_id=call_id, attempt=attempt, choice=choice, run_id="r1", node=None, model="desk", policy="desk",
                version=0, status=status, finish_reason=None, sampling={}, constrained=False, untrainable=None,
                prompt_ids=[1], sampled_ids=[attempt], logprobs=[0.0], created_at=NOW,
            )
            for call_id, attempt, choice, status in calls
        ]  # fmt: skip

    def calls(self, run_id: str) -> list[RecordedCall]:
        return [call for call in self.recorded if call.run_id == run_id]


def test_tokens_come_from_the_last_complete_attempt() -> None:
    run = a_run(calls=[a_call(), a_call().model_copy(update={"call_id": "c2"})])
    attempts = [(3, 0, "abandoned"), (2, 1, "complete"), (2, 0, "complete"), (0, 0, "failed"), (1, 0, "complete")]
    attach_tokens([run], Recorded(*(("c1", *attempt) for attempt in attempts)))
    assert run.calls[0].tokens is not None
    assert (run.calls[0].tokens.attempt, run.calls[0].tokens.choice) == (2, 0)
    assert run.calls[1].tokens is None


class AsyncRecorded(Recorded):
    async def calls(self, run_id: str) -> list[RecordedCall]:  # type: ignore[override]
        return super().calls(run_id)


async def test_tokens_are_attached_in_async_code_too() -> None:
    run = a_run(calls=[a_call()])
    await aattach_tokens([run], AsyncRecorded(("c1", 0, 0, "complete"), ("c1", 1, 0, "failed")))
    assert run.calls[0].tokens is not None
    assert run.calls[0].tokens.attempt == 0
