"""Small graphs that ask the policy ``desk``, and the check that every test of recordings ends with."""

from __future__ import annotations

from typing import Any

from langgraph.graph import END, START, MessagesState, StateGraph

from langgraph_art.chat_model import ChatART
from langgraph_art.runs import GraphRun

from .openai_stub import OpenAIStub


def ask_model(state: MessagesState) -> dict[str, Any]:
    return {"messages": [ChatART(model="desk").invoke(state["messages"])]}


async def ask_model_async(state: MessagesState) -> dict[str, Any]:
    return {"messages": [await ChatART(model="desk").ainvoke(state["messages"])]}


def graph_of(*, checkpointer: Any = None, **nodes: Any) -> Any:
    """A graph whose nodes run one after the other."""
    builder = StateGraph(MessagesState)
    before = START
    for name, node in nodes.items():
        builder.add_node(name, node)
        builder.add_edge(before, name)
        before = name
    builder.add_edge(before, END)
    return builder.compile(checkpointer=checkpointer)


def said(text: str) -> dict[str, Any]:
    return {"messages": [("user", text)]}


def agrees(run: GraphRun, stub: OpenAIStub) -> None:
    """The run's calls are those that the server logged under its id, call for call, node for node."""
    logged = {(request.call, request.node) for request in stub.of_run(run.run_id)}
    assert logged == {(call.call_id, call.node) for call in run.calls if call.art}
    assert len({call.call_id for call in run.calls}) == len(run.calls)
