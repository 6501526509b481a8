"""Calls that no recording can claim: kept, marked with their line, reported once, and never guessed into a run."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import FakeListLLM
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_core.runnables.config import ContextThreadPoolExecutor
from langgraph.graph import MessagesState

from langgraph_art.chat_model import ChatART
from langgraph_art.instrument import record_all
from langgraph_art.recording import record
from langgraph_art.runs import GraphRun, NodeCall
from langgraph_art.unattributed import UNATTRIBUTED, UnattributedCall, unattributed_calls

from .graphs import agrees, ask_model, graph_of, said
from .openai_stub import OpenAIStub


@pytest.fixture(autouse=True)
def none_before() -> Iterator[None]:
    UNATTRIBUTED.calls.clear()
    yield
    assert not UNATTRIBUTED.open
    assert not UNATTRIBUTED._in_flight


def here(call: NodeCall) -> str:
    """The line that made the call, as text."""
    name, _, line = (call.caller or "").rpartition(":")
    assert name == __file__
    return Path(__file__).read_text().splitlines()[int(line) - 1].strip()


def in_thread(function: Any) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_a_call_in_a_plain_thread_is_kept_with_its_line(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk")

    def spread(state: MessagesState) -> dict[str, Any]:
        def work() -> None:
            for number in range(3):
                llm.invoke(f"in a thread {number}")  # this line

        in_thread(work)
        return ask_model(state)

    with warnings.catch_warnings(record=True) as shown, record() as run:
        warnings.simplefilter("default")
        graph_of(spread=spread).invoke(said("hello"))
    lost = unattributed_calls()
    assert [call.messages[0]["content"] for call in lost] == [f"in a thread {number}" for number in range(3)]
    assert all(here(call).endswith("# this line") for call in lost)
    assert (lost[0].node, lost[0].delivered) == ("", True)
    assert lost[0].response is not None
    assert lost[0].response["content"] == "re: in a thread 0"
    assert len(shown) == 1, "once for a line"
    assert (shown[0].filename, shown[0].lineno) == (__file__, int((lost[0].caller or "").rpartition(":")[2]))
    assert "ContextThreadPoolExecutor" in str(shown[0].message)
    assert [call.node for call in run.calls] == ["spread"]
    agrees(run, stub)
    # The server has them too, without a run.
    assert {request.call for request in stub.log if request.run is None} == {call.call_id for call in lost}


def test_a_pool_that_is_given_the_models_method_is_told_by_who_fills_it(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk")

    def spread(state: MessagesState) -> dict[str, Any]:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(llm.invoke, ["!slow 0.05", "b", "c"]))  # this line
        return ask_model(state)

    with pytest.warns(UnattributedCall), record():
        graph_of(spread=spread).invoke(said("hello"))
    assert [here(call).endswith("# this line") for call in unattributed_calls()] == [True] * 3


def test_another_kind_of_pool_is_told_by_who_waits(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk")

    def spread(state: MessagesState) -> dict[str, Any]:
        with ThreadPool(2) as pool:
            pool.map(llm.invoke, ["!slow 0.05", "!slow 0.1"])  # this line
        return ask_model(state)

    with pytest.warns(UnattributedCall), record():
        graph_of(spread=spread).invoke(said("hello"))
    # A pool may be faster than the node that fills it; who waits at all waits at that line.
    assert any(call.caller and here(call).endswith("# this line") for call in unattributed_calls())


async def test_an_event_loops_executor_that_is_given_the_models_method(stub: OpenAIStub) -> None:
    """Nothing of the app is on the stack there, and in an event loop no thread waits at the line either."""
    llm = ChatART(model="desk")
    submit = ThreadPoolExecutor.submit

    async def spread(state: MessagesState) -> dict[str, Any]:
        await asyncio.get_running_loop().run_in_executor(None, llm.invoke, "x")  # this line
        return {"messages": []}

    with pytest.warns(UnattributedCall, match="'desk'") as shown, record():
        await graph_of(spread=spread).ainvoke(said("hello"))
    (lost,) = unattributed_calls()
    assert here(lost).endswith("# this line")
    assert lost.caller == f"{shown[0].filename}:{shown[0].lineno}"
    assert ThreadPoolExecutor.submit is submit, "nothing stays behind"


async def test_an_executor_and_a_whole_graph_without_context(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk")
    graph = graph_of(plan=ask_model)

    async def spread(state: MessagesState) -> dict[str, Any]:
        await asyncio.get_running_loop().run_in_executor(None, lambda: llm.invoke("x"))  # this line
        await asyncio.to_thread(llm.invoke, "attributed")
        return {"messages": []}

    with record() as run:
        with pytest.warns(UnattributedCall):
            await graph_of(spread=spread).ainvoke(said("hello"))
        with pytest.warns(UnattributedCall):
            in_thread(lambda: graph.invoke(said("in a thread")))
    first, second = unattributed_calls()
    assert here(first).endswith("# this line")
    assert (second.node, second.messages[0]["content"]) == ("plan", "in a thread")
    assert [call.messages[0]["content"] for call in run.calls] == ["attributed"]


def test_streams_errors_and_plain_llms(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk", max_retries=0)

    def work() -> None:
        list(llm.stream("streamed words"))
        with pytest.raises(Exception, match="engine died"):
            llm.invoke("!500")
        FakeListLLM(responses=["text"]).invoke("plain")

    with pytest.warns(UnattributedCall), record() as run:
        in_thread(work)
    streamed, failed, plain = unattributed_calls()
    assert streamed.response is not None
    assert streamed.response["content"].split() == ["re:", "streamed", "words"]
    assert (failed.delivered, failed.error is not None) == (False, True)
    assert (plain.messages[0]["content"], plain.response and plain.response["content"]) == ("plain", "text")
    assert run.calls == []


def test_ways_to_keep_the_context(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk")

    def spread(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
        with ContextThreadPoolExecutor(2) as pool:
            list(pool.map(llm.invoke, ["a", "b"]))
        with ThreadPoolExecutor(2) as plain:
            plain.submit(contextvars.copy_context().run, llm.invoke, "c").result()
            plain.submit(llm.invoke, "d", config).result()
        return {"messages": []}

    with warnings.catch_warnings(), record() as run:
        warnings.simplefilter("error", UnattributedCall)
        graph_of(spread=spread).invoke(said("hello"))
    assert [call.node for call in run.calls] == ["spread"] * 4
    assert unattributed_calls() == []
    agrees(run, stub)


def test_a_recording_inside_a_chain_that_began_outside_claims_its_calls(stub: OpenAIStub) -> None:
    """There the handler for lost calls comes before the recorder, in a thread that has only the config."""
    llm = ChatART(model="desk")

    def inside(text: str) -> str:
        with record(run_id="inner") as run, ThreadPoolExecutor(1) as pool:
            config = RunnableLambda(lambda _, config: config)
            pool.submit(llm.invoke, text, config.invoke(0)).result()
        assert len(run.calls) == 1
        return text

    with warnings.catch_warnings():
        warnings.simplefilter("error", UnattributedCall)
        contextvars.Context().run(RunnableLambda(inside).invoke, "hello")
    assert unattributed_calls() == []
    assert [request.run for request in stub.log] == ["inner"]


async def test_what_is_meant_to_be_outside_is_not_reported(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk")
    done = asyncio.Event()

    async def other_run() -> None:
        with record():
            await done.wait()

    async def judged() -> None:
        with record():
            await llm.ainvoke("one")
        await llm.ainvoke("after its end, such as a reward")
        await asyncio.to_thread(llm.invoke, "after its end, in a thread")

    def around(text: str) -> None:
        with record():
            llm.invoke(text)
        llm.invoke("after its end, in a chain that began before it")

    with warnings.catch_warnings():
        warnings.simplefilter("error", UnattributedCall)
        contextvars.Context().run(llm.invoke, "no recording is open")
        other = asyncio.create_task(other_run())
        await asyncio.create_task(judged())
        contextvars.Context().run(RunnableLambda(around).invoke, "hello")
        done.set()
        await other
    assert unattributed_calls() == []


def test_calls_that_record_all_has_are_not_even_looked_at(stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch) -> None:
    """No context of its runs knows a recording; each call would be written down twice, with all its messages."""
    monkeypatch.setattr(UNATTRIBUTED, "_add", lambda call: pytest.fail(f"{call.node} was taken"))
    runs: list[GraphRun] = []
    stop = record_all(runs.append)
    try:
        graph_of(plan=ask_model).invoke(said("hello"))
        in_thread(lambda: graph_of(plan=ask_model).invoke(said("in a thread")))
    finally:
        stop()
    assert [[call.node for call in run.calls] for run in runs] == [["plan"], ["plan"]]


def test_only_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert UNATTRIBUTED.calls.maxlen == 1000
    monkeypatch.setattr(UNATTRIBUTED, "calls", deque(maxlen=2))
    plain = FakeListLLM(responses=["text"])
    with pytest.warns(UnattributedCall), record():
        in_thread(lambda: [plain.invoke(str(number)) for number in range(4)])
    assert [call.messages[0]["content"] for call in unattributed_calls()] == ["2", "3"]
