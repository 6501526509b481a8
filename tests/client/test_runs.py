"""What a saved run must keep: everything, exactly."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langgraph.types import Command
from pydantic import BaseModel

from langgraph_art.errors import RunFileError
from langgraph_art.plain import from_plain, to_plain
from langgraph_art.protocol import RecordedCall
from langgraph_art.runs import GraphRun, NodeCall, RunError, RunGroup, attach_tokens, load_runs, save_runs

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


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"format": "langgraph-art.run", "version": 1, "run_id"', "line 2: not valid JSON"),
        ('{"some": "thing"}', "line 2: not a graph run"),
        ("[1, 2]", "line 2: not a graph run"),
        ('{"format": "langgraph-art.run", "version": 99, "run_id": "r"}', r"line 2: format version 99.*Upgrade"),
        ('{"format": "langgraph-art.run", "version": 1, "calls": []}', "line 2: .*run_id"),
        ('{"format": "langgraph-art.run", "version": 1, "run_id": "r", "input": {"$type": "message"}}', "line 2: "),
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
