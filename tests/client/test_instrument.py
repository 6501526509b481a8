from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, interrupt

from langgraph_art import ChatART, instrument, load_runs, record, record_all
from langgraph_art.runs import GraphRun
from langgraph_art.unattributed import current

from .openai_stub import OpenAIStub

# Processes and threads are started again and again.
pytestmark = pytest.mark.slow


@pytest.fixture
def runs(stub: OpenAIStub) -> Iterator[Callable[[], list[GraphRun]]]:
    """Everything is recorded; gives the runs so far, and after it the recording is over."""
    found: list[GraphRun] = []
    stop = record_all(found.append, metadata={"app": "test"})

    def so_far() -> list[GraphRun]:
        stop()
        return found

    yield so_far
    stop()


def chain(*nodes: Any, **options: Any) -> Any:
    builder = StateGraph(MessagesState)
    names = [START]
    for node in nodes:
        name, function = node if isinstance(node, tuple) else (node.__name__, node)
        builder.add_node(name, function)
        builder.add_edge(names[-1], name)
        names.append(name)
    builder.add_edge(names[-1], END)
    return builder.compile(**options)


def say(state: MessagesState) -> dict[str, Any]:
    return {"messages": [ChatART(model="p").invoke(state["messages"])]}


def ask(text: str = "hi") -> dict[str, Any]:
    return {"messages": [("human", text)]}


def test_every_invocation_is_a_run(runs: Callable[[], list[GraphRun]], stub: OpenAIStub) -> None:
    graph, context = chain(say, ("inner", chain(say))), current.get()
    graph.invoke(ask("one"))
    assert current.get() is context  # or calls that no recording knows would no longer be reported here
    list(graph.stream(ask("two"), stream_mode="messages"))
    graph.batch([ask("three"), ask("four")])
    RunnableLambda(lambda x: graph.invoke(x)).invoke(ask("five"))
    ChatART(model="p").invoke("outside any graph")
    found = runs()
    assert sorted(run.input["messages"][0][1] for run in found) == ["five", "four", "one", "three", "two"]
    for run in found:
        assert [(call.node, call.art, call.delivered) for call in run.calls] == [
            ("say", True, True),
            ("inner|say", True, True),
        ]
        assert [request.call for request in stub.of_run(run.run_id)] == [call.call_id for call in run.calls]
        assert len(run.output["messages"]) == 3
        assert run.ended_at is not None
        assert run.metadata == {"app": "test"}
    assert len(stub.log) == 11


async def test_async_runs_at_once(runs: Callable[[], list[GraphRun]], stub: OpenAIStub) -> None:
    async def asay(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await ChatART(model="p").ainvoke(state["messages"])]}

    graph = chain(asay, say)
    await asyncio.gather(*(graph.ainvoke(ask(str(i))) for i in range(5)))
    found = runs()
    assert sorted(run.input["messages"][0][1] for run in found) == list("01234")
    for run in found:
        assert [request.node for request in stub.of_run(run.run_id)] == ["asay", "say"]
        assert run.calls[0].messages[0]["content"] == run.input["messages"][0][1]


def test_generators_that_take_turns_stay_apart(runs: Callable[[], list[GraphRun]]) -> None:
    graph = chain(say, ("again", say))
    first, second = graph.stream(ask("a")), graph.stream(ask("b"))
    for _ in zip(first, second, strict=True):
        pass
    found = runs()
    assert [[call.node for call in run.calls] for run in found] == [["say", "again"]] * 2
    assert [run.calls[1].messages[0]["content"] for run in found] == ["a", "b"]


def test_models_in_tools_and_with_callbacks_of_their_own(runs: Callable[[], list[GraphRun]]) -> None:
    @tool
    def look(word: str) -> str:
        """Look it up."""
        return ChatART(model="q").invoke(word).text

    def call(state: MessagesState) -> dict[str, Any]:
        return {"messages": [ChatART(model="p").bind_tools([look]).invoke(state["messages"])]}

    def apart(state: MessagesState) -> dict[str, Any]:
        return {"messages": [ChatART(model="r").invoke("x", {"callbacks": [BaseCallbackHandler()]})]}

    chain(call, ("tools", ToolNode([look])), apart).invoke(ask('!tool look {"word": "w"}'))
    (run,) = runs()
    assert [(call.node, call.model) for call in run.calls] == [("call", "p"), ("tools", "q"), ("apart", "r")]


def test_a_block_has_its_runs_to_itself(runs: Callable[[], list[GraphRun]], stub: OpenAIStub) -> None:
    with record() as own:
        chain(say).invoke(ask())
    chain(say).invoke(ask("other"))
    (found,) = runs()
    assert found.input == ask("other")
    assert len(own.calls) == len(found.calls) == 1
    assert [request.run for request in stub.log] == [own.run_id, found.run_id]


def test_errors(runs: Callable[[], list[GraphRun]]) -> None:
    def fail(state: MessagesState) -> dict[str, Any]:
        raise KeyError("k")

    with pytest.raises(KeyError):
        chain(say, fail).invoke(ask())
    abandoned = chain(say, ("again", say)).stream(ask())
    next(abandoned)
    abandoned.close()
    failed, left = runs()
    assert failed.error is not None
    assert (failed.error.type, failed.error.node, len(failed.calls)) == ("KeyError", "fail", 1)
    assert left.error is not None
    assert left.error.infrastructure


def test_a_resumed_run_goes_on(runs: Callable[[], list[GraphRun]], stub: OpenAIStub) -> None:
    def approve(state: MessagesState) -> dict[str, Any]:
        return {"messages": [("human", interrupt("may I?"))]}

    graph = chain(say, approve, ("after", say), checkpointer=InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "t"}}
    graph.invoke(ask(), thread)
    graph.invoke(Command(resume="yes"), thread)
    graph.invoke(ask("new"), thread)
    waiting, whole, new = runs()
    assert waiting.run_id == whole.run_id != new.run_id
    assert [call.node for call in waiting.calls] == ["say"]
    assert [call.node for call in whole.calls] == ["say", "after"]
    assert whole.interrupts[0].answer == "yes"
    assert {request.run for request in stub.log[:2]} == {whole.run_id}


def test_a_sink_that_fails_or_is_slow_hinders_nobody(stub: OpenAIStub, caplog: pytest.LogCaptureFixture) -> None:
    found: list[str] = []

    def sink(run: GraphRun) -> None:
        time.sleep(0.3)
        if not found:
            found.append("failed")
            raise OSError("disk full")
        found.append(run.run_id)

    stop = record_all(sink)
    began = time.monotonic()
    chain(say).invoke(ask())
    chain(say).invoke(ask())
    assert time.monotonic() - began < 0.3
    stop()
    assert len(found) == 2
    assert "could not be handed on" in caplog.text


def test_a_sink_that_hangs_ends_the_waiting(
    stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(instrument, "_PATIENCE", 0.1)
    free = threading.Event()
    stop = record_all(lambda run: free.wait())
    chain(say).invoke(ask())
    chain(say).invoke(ask())
    stop()
    free.set()
    assert "the sink is busy" in caplog.text


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        record_all(tmp_path / "missing" / "runs.jsonl")
    record_all(tmp_path / "runs.jsonl")()


def test_only_one_at_a_time(stub: OpenAIStub) -> None:
    stop = record_all(lambda run: None)
    with pytest.raises(RuntimeError, match="already"):
        record_all(lambda run: None)
    stop()
    stop()
    record_all(lambda run: None)()


def test_the_environment_variable(stub: OpenAIStub, tmp_path: Path) -> None:
    script = tmp_path / "app.py"
    script.write_text(
        "from langgraph.graph import StateGraph, MessagesState, START\n"
        "from langgraph_art import ChatART\n"
        "def say(state):\n    return {'messages': [ChatART(model='p').invoke(state['messages'])]}\n"
        "builder = StateGraph(MessagesState)\nbuilder.add_node('say', say)\nbuilder.add_edge(START, 'say')\n"
        "builder.compile().invoke({'messages': [('human', 'hi')]})\n"
    )
    environment = {**os.environ, "LANGGRAPH_ART_RECORD": str(tmp_path / "runs.jsonl"), "LANGGRAPH_ART_URL": stub.url}
    subprocess.run([sys.executable, script], env=environment, check=True, timeout=60)
    (run,) = load_runs(tmp_path / "runs.jsonl")
    assert [call.node for call in run.calls] == ["say"]
    assert run.output["messages"][-1].text == "re: hi"


def test_threads_are_left_to_end_by_themselves(stub: OpenAIStub) -> None:
    before = threading.active_count()
    record_all(lambda run: None)()
    assert threading.active_count() == before
