"""What the redaction function hides is in no file, and nothing in memory changes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.graph import END, START, MessagesState, StateGraph

from langgraph_art import ChatART, record
from langgraph_art.errors import ArtError
from langgraph_art.redaction import redact_texts, set_redaction
from langgraph_art.runs import GraphRun, RunError, RunInterrupt, load_runs, save_runs
from langgraph_art.warm_up import make_sft

from .openai_stub import OpenAIStub
from .test_runs import NOW, a_call, a_run, graph_runs

SECRET = "ann@example.org"
TOOL = {"type": "function", "function": {"name": "mail", "description": f"mails {SECRET}", "parameters": {}}}


@pytest.fixture(autouse=True)
def redaction() -> Iterator[None]:
    yield
    set_redaction(None)


def without_addresses(text: str) -> str:
    return re.sub(r"\S+@example\.org", "<address>", text)


def a_run_full_of_secrets() -> GraphRun:
    said = [
        HumanMessage([{"type": "text", "text": f"I am {SECRET}"}], name=SECRET),
        AIMessage(
            "",
            tool_calls=[{"name": "mail", "args": {"to": [SECRET]}, "id": "t"}],
            invalid_tool_calls=[{"name": "f", "args": SECRET, "id": "u", "error": SECRET, "type": "invalid_tool_call"}],
            additional_kwargs={"reasoning": f"ask {SECRET}"},
        ),
        ToolMessage(f"sent to {SECRET}", tool_call_id="t", artifact={"to": SECRET}),
    ]
    error = RunError(type="ValueError", message=f"no {SECRET}", node="planner", infrastructure=False)
    call = a_call(response=said[1].model_dump(), error=error)
    call.messages, call.tools = [message.model_dump() for message in said], [{"description": f"mails {SECRET}"}]
    pause = RunInterrupt(id="i", node="n", value={"mail": SECRET}, at=NOW, answered=True, answer=[SECRET])
    state = {"messages": said, "who": (SECRET, b"x"), "type": SECRET}
    return a_run(
        input=state, output=state, calls=[call], interrupts=[pause], error=error, metadata={"user": {"mail": SECRET}}
    )


def test_every_place_of_a_saved_run_is_covered(tmp_path: Path) -> None:
    run = a_run_full_of_secrets()
    before = repr(run)
    save_runs(tmp_path / "plain.jsonl", [run])
    secrets = (tmp_path / "plain.jsonl").read_text().count(SECRET)
    set_redaction(redact_texts(without_addresses))
    save_runs(tmp_path / "runs.jsonl", [run])
    save_runs(tmp_path / "runs.jsonl", [run], append=True)
    content = (tmp_path / "runs.jsonl").read_text()
    assert SECRET not in content
    assert content.count("<address>") == 2 * secrets > 40
    assert repr(run) == before, "rewards are computed from what really happened"
    set_redaction(None)
    loaded = load_runs(tmp_path / "runs.jsonl")[0]
    assert loaded.input["messages"][1].tool_calls[0]["args"] == {"to": ["<address>"]}
    assert loaded.input["who"] == ("<address>", b"x")
    assert loaded.calls[0].messages[2]["content"] == "sent to <address>"
    assert loaded.interrupts[0].answer == ["<address>"]
    assert (loaded.run_id, loaded.calls[0].call_id, loaded.calls[0].node) == ("r1", "c1", "planner|model")


@given(run=graph_runs())
@settings(max_examples=25, deadline=None)
def test_a_run_whose_texts_are_all_hidden_can_be_read(tmp_path_factory: pytest.TempPathFactory, run: GraphRun) -> None:
    path = tmp_path_factory.getbasetemp() / "hidden.jsonl"
    set_redaction(redact_texts(lambda text: "*"))
    save_runs(path, [run])
    (loaded,) = load_runs(path)
    assert [call.call_id for call in loaded.calls] == [call.call_id for call in run.calls]
    assert [message["type"] for call in loaded.calls for message in call.messages] == [
        message["type"] for call in run.calls for message in call.messages
    ]


def test_the_function_may_work_on_structure(tmp_path: Path) -> None:
    def without_passwords(data: Any) -> Any:
        if isinstance(data, dict):
            data.pop("password", None)
        return data

    set_redaction(without_passwords)
    given = {"password": 1234, "q": "hi"}
    save_runs(tmp_path / "runs.jsonl", [a_run(input=given, metadata={"password": "x"})])
    (loaded,) = load_runs(tmp_path / "runs.jsonl")
    assert (loaded.input, loaded.metadata) == ({"q": "hi"}, {})
    assert given == {"password": 1234, "q": "hi"}


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (
            lambda data: None if isinstance(data, dict) and "content" in data else data,
            "returned NoneType for a message of run r1",
        ),
        (lambda data: 7 if isinstance(data, str) else data, "returned int for an error of run r1"),
        (lambda data: {**data, "x": object()} if isinstance(data, dict) else data, "JSON cannot hold"),
    ],
)
def test_a_function_that_breaks_the_file_is_refused(tmp_path: Path, function: Any, says: str) -> None:
    path = tmp_path / "runs.jsonl"
    save_runs(path, [a_run()])
    before = path.read_bytes()
    set_redaction(function)
    for append in (False, True):
        with pytest.raises(ArtError, match=says):
            save_runs(path, [a_run(), a_run_full_of_secrets()], append=append)
        assert path.read_bytes() == before


def test_its_own_error_goes_to_the_caller_and_nothing_is_written(tmp_path: Path) -> None:
    def broken(data: Any) -> Any:
        raise LookupError("no rules")

    set_redaction(broken)
    with pytest.raises(LookupError, match="no rules"):
        save_runs(tmp_path / "runs.jsonl", [a_run()])
    assert list(tmp_path.iterdir()) == []


def test_tokens_are_not_written_past_it(tmp_path: Path) -> None:
    from .test_runs import Recorded, attach_tokens

    run = a_run(calls=[a_call()])
    attach_tokens([run], Recorded(("c1", 0, 0, "complete")))
    set_redaction(redact_texts(without_addresses))
    with pytest.raises(ArtError, match="Run r1 carries tokens"):
        save_runs(tmp_path / "runs.jsonl", [run])
    run.calls[0].tokens = None
    save_runs(tmp_path / "runs.jsonl", [run])


def test_conversations_to_learn_from_are_covered() -> None:
    said = [HumanMessage(f"I am {SECRET}"), AIMessage("hello")]
    call = a_call(response=said[1].model_dump(), delivered=True, tools=[TOOL])
    call.messages = [said[0].model_dump()]
    given = {"messages": [{"role": "user", "content": SECRET}, {"role": "assistant", "content": "hi"}]}
    set_redaction(redact_texts(without_addresses))
    submission, _ = make_sft("desk", [call, given])
    sent = submission.model_dump_json()
    assert SECRET not in sent
    assert sent.count("<address>") == 3
    assert given["messages"][0]["content"] == SECRET
    set_redaction(redact_texts(lambda text: "*"))
    submission, _ = make_sft("desk", [given])
    assert [message["role"] for message in submission.examples[0].messages] == ["user", "assistant"]
    set_redaction(lambda data: {} if "role" in data else data)
    with pytest.raises(ArtError, match="made a conversation that is none"):
        make_sft("desk", [given])


def test_prompts_go_to_the_model_as_they_are(stub: OpenAIStub, tmp_path: Path) -> None:
    llm = ChatART(model="desk")
    builder = StateGraph(MessagesState)
    builder.add_node("talk", lambda state: {"messages": [llm.invoke(state["messages"])]})
    graph = builder.add_edge(START, "talk").add_edge("talk", END).compile()
    set_redaction(redact_texts(without_addresses))
    with record() as run:
        graph.invoke({"messages": [HumanMessage(f"I am {SECRET}")]})
    assert stub.log[0].body["messages"][0]["content"] == f"I am {SECRET}"
    save_runs(tmp_path / "runs.jsonl", [run])
    content = (tmp_path / "runs.jsonl").read_text()
    assert SECRET not in content
    assert "re: I am <address>" in content
