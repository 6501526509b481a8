"""Several policies in one graph: a run sees one version of each, whatever is trained meanwhile; each call tells it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from langgraph_art import ChatART, GraphRun, record

from .rooms import Rooms

CHAT = "/v1/chat/completions"
INPUT: Any = {"messages": [("user", "where is my order")]}


@pytest.fixture
async def url(rooms: Rooms) -> AsyncIterator[str]:
    async with rooms.served() as address:
        yield f"{address}/v1"


def desk_and_clerk(url: str, between: Callable[[], Any], **compiled: Any) -> Any:
    """Nodes that ask desk, clerk, and both again; ``between`` is called after the first."""

    def asking(*models: str, then: Callable[[], Any] = lambda: None, **options: Any) -> Any:
        async def node(state: MessagesState) -> dict[str, Any]:
            llms = [ChatART(model=model, base_url=url, **options) for model in models]
            answers = await asyncio.gather(*(llm.ainvoke(state["messages"]) for llm in llms))
            then()
            return {"messages": answers[:1]}

        return node

    builder = StateGraph(MessagesState)
    builder.add_node("plan", asking("desk", temperature=0.3, stop=["END"], then=between))
    builder.add_node("write", asking("clerk", max_tokens=9))
    builder.add_node("check", asking("desk", "clerk", "desk@0", "tiny"))
    for edge in ((START, "plan"), ("plan", "write"), ("write", "check"), ("check", END)):
        builder.add_edge(*edge)
    return builder.compile(**compiled)


def versions(run: GraphRun) -> list[tuple[str, str]]:
    return sorted((call.node, call.version or "") for call in run.calls)


async def test_a_run_keeps_its_versions_while_new_ones_come(rooms: Rooms, url: str) -> None:
    rooms.add_version("desk")
    with record() as run:
        await desk_and_clerk(url, lambda: (rooms.add_version("desk"), rooms.add_version("clerk"))).ainvoke(INPUT)
    assert versions(run) == [
        ("check", ""),
        ("check", "clerk@1"),
        ("check", "desk@0"),
        ("check", "desk@1"),
        ("plan", "desk@1"),
        ("write", "clerk@1"),
    ]
    with record() as later:
        await desk_and_clerk(url, lambda: None).ainvoke(INPUT)
    assert [version for node, version in versions(later) if node == "plan"] == ["desk@2"]
    recorded = {call.call_id: call for call in rooms.calls.of_run(run.run_id)}
    for call in run.calls:
        kept = recorded[call.call_id]
        assert call.version == (None if kept.policy is None else f"{kept.policy}@{kept.version}")
        assert (kept.node, kept.run_id) == (call.node, run.run_id)
    assert all(call.art for call in run.calls), "the base model's calls too; the server says that they do not train"


async def test_runs_of_a_group_share_versions_and_a_resumed_run_keeps_them(rooms: Rooms, url: str) -> None:
    async def ask_human(state: MessagesState) -> dict[str, Any]:
        answer = await ChatART(model="desk", base_url=url).ainvoke(state["messages"])
        return {"messages": [answer, ("user", interrupt("go on?"))]}

    builder = StateGraph(MessagesState)
    builder.add_node("ask", ask_human)
    builder.add_edge(START, "ask")
    graph = builder.compile(checkpointer=InMemorySaver())
    for group_id in ("g", None):
        before = rooms.policies.serving_version("desk")
        with record(group_id=group_id) as first:
            await graph.ainvoke(INPUT, {"configurable": {"thread_id": first.run_id}})
        rooms.add_version("desk")
        with record(resume=first):
            await graph.ainvoke(Command(resume="yes"), {"configurable": {"thread_id": first.run_id}})
        with record(group_id=group_id) as second:
            await graph.ainvoke(INPUT, {"configurable": {"thread_id": second.run_id}})
        assert versions(first) == [("ask", f"desk@{before}")] * 2
        assert versions(second) == [("ask", f"desk@{before if group_id else before + 1}")]


async def test_sampling_for_training_leaves_everything_else_as_the_app_set_it(rooms: Rooms, url: str) -> None:
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": None}
    graph = desk_and_clerk(url, lambda: None)
    await graph.ainvoke(INPUT)
    with record(sampling=sampling) as run:
        await graph.ainvoke(INPUT)
    await graph.ainvoke(INPUT)
    bodies = rooms.stub.bodies(CHAT)
    size = len(run.calls)
    before, during, after = bodies[:size], bodies[size : 2 * size], bodies[2 * size :]
    assert before == after, "outside the recording nothing changes"
    assert [body["temperature"] for body in before[:2]] == [0.3, 1.0], "the engine is told what the app left open"
    for body, changed in zip(before, during, strict=True):
        assert (changed["temperature"], changed["top_p"]) == (1.0, 1.0)
        same = body.keys() - {"temperature", "top_p", "messages"}
        assert {key: body[key] for key in same} == {key: changed[key] for key in same}
    assert (during[0]["stop"], during[1]["max_completion_tokens"]) == (["END"], 9)
