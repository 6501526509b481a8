"""The stub server, and graphs that talk to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypedDict

import pytest
from langgraph.graph import END, START, StateGraph

from langgraph_art.chat_model import ChatART

from .stub_server import StubServer


class Ticket(TypedDict, total=False):
    """State of the test graph."""

    text: str
    tags: list[str]
    answer: str


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubServer]:
    """A running stub, to which clients and models point by default."""
    server = StubServer()
    server.start()
    monkeypatch.setenv("LANGGRAPH_ART_URL", server.url)
    monkeypatch.delenv("LANGGRAPH_ART_API_KEY", raising=False)
    yield server
    server.stop()


def build(
    *, before: Callable[[Ticket], str | None] = lambda state: None, model: str = "desk", **compile_args: Any
) -> Any:
    """A compiled graph with one synchronous node ``clerk`` that asks the model about the text.

    Args:
        before: called in the node before the model; may return another text to ask about, or raise.
        model: policy to call.
        compile_args: for ``compile``.
    """
    llm = ChatART(model=model, max_retries=0, temperature=0.3)

    def clerk(state: Ticket) -> Ticket:
        text = before(state) or state["text"]
        return {"answer": str(llm.invoke(text).content)}

    graph = StateGraph(Ticket)
    graph.add_node("clerk", clerk)
    graph.add_edge(START, "clerk")
    graph.add_edge("clerk", END)
    return graph.compile(**compile_args)
