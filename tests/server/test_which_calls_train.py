"""A call trains if and only if its answer reached the graph: each case from the graph to the join, over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.exceptions import OutputParserException
from langchain_core.globals import set_llm_cache
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import PydanticOutputParser
from langgraph.cache.memory import InMemoryCache as NodeCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import CachePolicy, Command, RetryPolicy, interrupt
from pydantic import BaseModel

from langgraph_art import ChatART, GraphRun, RunGroup, TrainConfig, record
from langgraph_art.submissions import make_submission
from langgraph_art_server.training.join import join

from .rooms import Rooms, eventually
from .stub_engine import BEFORE, Answer

CONFIG: Any = {"configurable": {"thread_id": "t"}}


@pytest.fixture
async def model(rooms: Rooms) -> AsyncIterator[Callable[..., ChatART]]:
    """Makes a model of the policy ``desk``."""
    async with rooms.served() as url:
        yield lambda **options: ChatART(model="desk", base_url=f"{url}/v1", **{"max_retries": 0, **options})


def graph_of(node: Any, **compiled: Any) -> Any:
    """A graph of one node, ``plan``."""
    builder = StateGraph(MessagesState)
    builder.add_node("plan", node, retry_policy=RetryPolicy(initial_interval=0.001, retry_on=ConnectionError))
    builder.add_edge(START, "plan")
    return builder.compile(**compiled)


INPUT: Any = {"messages": [("user", "where is my order")]}


async def trained(rooms: Rooms, *runs: GraphRun, **options: Any) -> tuple[list[list[int]], dict[str, int]]:
    """Sampled ids of what would train, in the order of the calls, and why the rest would not."""
    for run in runs:
        run.reward = 1.0
    config = TrainConfig(**options)
    submission, _ = make_submission([RunGroup(group_id="g", runs=list(runs))], config=config)
    ids = [claim.call_id for run in submission.groups[0].runs for claim in run.calls]
    await rooms.gateway.wait_closed(ids, 10)
    joined = join(submission, rooms.calls.of_ids(ids), {"desk": 0, "clerk": 0}, set())
    calls = {
        call.call_id: call.sampled_ids
        for groups in joined.groups.values()
        for group in groups
        for run in group.runs
        for call in run.calls
    }
    return [calls[call_id] for call_id in ids if call_id in calls], dict(joined.skipped)


async def test_an_answer_that_could_not_be_parsed(rooms: Rooms, model: Callable[..., ChatART]) -> None:
    class Verdict(BaseModel):
        good: bool

    async def plan(state: MessagesState) -> Any:
        return {"messages": [await (model() | PydanticOutputParser(pydantic_object=Verdict)).ainvoke("judge")]}

    rooms.stub.next(Answer(ids=(21, 22)))
    with pytest.raises(OutputParserException), record() as run:
        await graph_of(plan).ainvoke(INPUT)
    assert run.error is not None
    assert not run.error.infrastructure
    assert await trained(rooms, run) == ([[21, 22]], {})


async def test_tool_arguments_that_are_no_object(rooms: Rooms, model: Callable[..., ChatART]) -> None:
    async def plan(state: MessagesState) -> Any:
        return {"messages": [await model().ainvoke("go")]}

    rooms.stub.next(Answer(ids=(21, 22), tool_calls=[("look", "[1, 2]")]))
    with record() as run:
        state = await graph_of(plan).ainvoke(INPUT)
    assert len(state["messages"][-1].invalid_tool_calls) == 1
    assert await trained(rooms, run) == ([[21, 22]], {})


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_structured_output_that_was_cut(rooms: Rooms, model: Callable[..., ChatART], streaming: bool) -> None:
    """It counts as arrived. A grammar shaped it, so it trains only where that is chosen."""

    class Verdict(BaseModel):
        good: bool

    judge = model(max_tokens=2, streaming=streaming).with_structured_output(Verdict)

    async def plan(state: MessagesState) -> Any:
        return {"messages": [str(await judge.ainvoke("judge"))]}

    rooms.stub.next(Answer(ids=(21, 22, 23), piece='{"go'))
    with pytest.raises(Exception), record() as run:  # noqa: B017, PT011  # whose class is the chat model's matter
        await graph_of(plan).ainvoke(INPUT)
    assert [(call.delivered, call.finish_reason) for call in run.calls] == [(True, "length")]
    assert await trained(rooms, run) == ([], {"call:constrained": 1})
    assert await trained(rooms, run, constrained="train") == ([[21, 22]], {})


async def test_a_plain_answer_that_was_cut(rooms: Rooms, model: Callable[..., ChatART]) -> None:
    with record() as run:
        await model(max_tokens=2).ainvoke("say")
    assert run.calls[0].finish_reason == "length"
    assert await trained(rooms, run) == ([[11, 12]], {})


async def test_node_retries(rooms: Rooms, model: Callable[..., ChatART]) -> None:
    failures = iter([True, False])

    async def plan(state: MessagesState) -> Any:
        answer = await model().ainvoke(state["messages"])
        if next(failures):
            raise ConnectionError("the tool was away")
        return {"messages": [answer]}

    for ids in ((21,), (22,)):
        rooms.stub.next(Answer(ids=ids))
    with record() as run:
        await graph_of(plan).ainvoke(INPUT)
    assert await trained(rooms, run) == ([[21], [22]], {})


async def test_replays_after_an_interrupt(rooms: Rooms, model: Callable[..., ChatART]) -> None:
    async def plan(state: MessagesState) -> Any:
        return {"messages": [await model().ainvoke(state["messages"]), ("user", interrupt("go on?"))]}

    for ids in ((21,), (22,)):
        rooms.stub.next(Answer(ids=ids))
    graph = graph_of(plan, checkpointer=InMemorySaver())
    with record() as run:
        await graph.ainvoke(INPUT, CONFIG)
    with record(resume=run):
        await graph.ainvoke(Command(resume="yes"), CONFIG)
    assert [call.attempt for call in run.calls] == [1, 2]
    assert await trained(rooms, run) == ([[21], [22]], {})


async def test_with_retry(rooms: Rooms, model: Callable[..., ChatART]) -> None:
    """The engine's failure is no answer; each try is a call of its own."""
    rooms.stub.next(Answer(status=500))
    rooms.stub.next(Answer(ids=(22,)))
    with record() as run:
        await model().with_retry(wait_exponential_jitter=False).ainvoke("say")
    assert [call.delivered for call in run.calls] == [False, True]
    assert await trained(rooms, run) == ([[22]], {"call:not_delivered": 1})


async def test_with_fallbacks(rooms: Rooms, model: Callable[..., ChatART]) -> None:
    other = GenericFakeChatModel(messages=iter([AIMessage("from another")]))
    rooms.stub.next(Answer(status=500))
    with record() as run:
        await model().with_fallbacks([model(), other]).ainvoke("say")
        rooms.stub.next(Answer(status=500))
        rooms.stub.next(Answer(status=500))
        await model().with_fallbacks([model(), other]).ainvoke("say")
    assert [(call.art, call.delivered) for call in run.calls] == [
        (True, False),
        (True, True),
        (True, False),
        (True, False),
        (False, True),
    ]
    assert await trained(rooms, run) == ([[11, 12, 13, 14]], {"call:not_delivered": 3})


@pytest.mark.parametrize("streaming", [False, True])
async def test_lost_answers_of_the_sdks_retries(rooms: Rooms, model: Callable[..., ChatART], streaming: bool) -> None:
    # A stream that has begun is not tried again.
    lost = rooms.stub.next(Answer(ids=(21, 22), wait_at=BEFORE if streaming else 0))
    rooms.stub.next(Answer(ids=(23,)))
    with record() as run:
        await model(max_retries=1, timeout=0.2, streaming=streaming).ainvoke("say")
    lost.go.set()
    (call,) = run.calls
    await eventually(lambda: len(rooms.calls.of_ids([call.call_id])[call.call_id]) == 2)
    first, second = sorted(rooms.calls.of_ids([call.call_id])[call.call_id], key=lambda record: record.attempt)
    assert (first.status, second.status) == ("abandoned", "complete")
    assert await trained(rooms, run) == ([[23]], {"call:retried": 1})


async def test_abandoned_streams(rooms: Rooms, model: Callable[..., ChatART]) -> None:
    async def plan(state: MessagesState) -> Any:
        stream = model().astream("say")
        await anext(stream)
        await stream.aclose()
        return {"messages": [await model().ainvoke("say")]}

    left = rooms.stub.next(Answer(ids=(21, 22, 23), wait_at=2))
    rooms.stub.next(Answer(ids=(24,)))
    with record() as run:
        await graph_of(plan).ainvoke(INPUT)
    left.go.set()
    await eventually(lambda: len(rooms.calls.of_run(run.run_id)) == 2)
    kept = {call.status: call.sampled_ids for call in rooms.calls.of_run(run.run_id)}
    assert kept == {"abandoned": [21], "complete": [24]}
    assert await trained(rooms, run) == ([[24]], {"call:not_delivered": 1})


async def test_unused_choices(rooms: Rooms, model: Callable[..., ChatART]) -> None:
    rooms.stub.next(Answer(ids=(21, 22)))
    with record() as run:
        await model(n=3).ainvoke("say")
    assert len(rooms.calls.of_run(run.run_id)) == 3
    assert await trained(rooms, run) == ([[21, 22]], {"call:unused_choice": 2})


async def test_cache_hits(rooms: Rooms, model: Callable[..., ChatART]) -> None:
    """LangChain's cache is never used by `ChatART`; a node that LangGraph does not run again makes no call."""
    set_llm_cache(InMemoryCache())
    try:
        with record() as run:
            await model().ainvoke("say")
            await model().ainvoke("say")
    finally:
        set_llm_cache(None)
    assert len(run.calls) == len(rooms.calls.of_run(run.run_id)) == 2
    assert await trained(rooms, run) == ([[11, 12, 13, 14]] * 2, {})

    async def plan(state: MessagesState) -> Any:
        return {"messages": [await model().ainvoke("say")]}

    builder = StateGraph(MessagesState)
    builder.add_node("plan", plan, cache_policy=CachePolicy(key_func=lambda _: "same"))
    builder.add_edge(START, "plan")
    graph = builder.compile(cache=NodeCache())
    with record() as first:
        await graph.ainvoke(INPUT)
    with record() as hit:
        await graph.ainvoke(INPUT)
    assert (len(first.calls), len(hit.calls)) == (1, 0)
    assert await trained(rooms, first, hit) == ([[11, 12, 13, 14]], {})


async def test_a_failed_call_and_a_cancelled_one(rooms: Rooms, model: Callable[..., ChatART]) -> None:
    held = rooms.stub.next(Answer(ids=(21,), wait_at=0))
    with record() as run:
        work = asyncio.create_task(model().ainvoke("say"))
        async with asyncio.timeout(10):
            await held.reached.wait()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await model().ainvoke("say")
    held.go.set()
    await eventually(lambda: len(rooms.calls.of_run(run.run_id)) == 2)
    assert await trained(rooms, run) == ([[11, 12, 13, 14]], {"call:not_delivered": 1})


async def test_calls_outside_a_policy_or_its_distribution(rooms: Rooms, model: Callable[..., ChatART]) -> None:
    with record() as run:
        await model(temperature=0).ainvoke("greedy")
        await model(top_p=0.5).ainvoke("altered")
        await model().bind(model="tiny").ainvoke("base")
        await model().ainvoke("good")
    assert await trained(rooms, run) == (
        [[11, 12, 13, 14]],
        {"call:greedy": 1, "call:altered_distribution": 1, "call:base_model": 1},
    )
