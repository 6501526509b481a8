"""Recording leaves nothing in an app's state: checkpoints are as large as with plain `ChatOpenAI`."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from langgraph_art import ChatART, record
from langgraph_art.protocol import HEADER_CALL

from .openai_stub import OpenAIStub

NODES = 10


def build(model: ChatOpenAI, saver: InMemorySaver, *, streams: bool) -> Any:
    """Ten nodes in a row; each asks the model with all that was said before."""

    def ask(state: MessagesState) -> dict[str, Any]:
        if not streams:
            return {"messages": [model.invoke(state["messages"])]}
        first, *rest = model.stream(state["messages"])
        for chunk in rest:
            first += chunk
        return {"messages": [first]}

    builder = StateGraph(MessagesState)
    names = [f"n{number}" for number in range(NODES)]
    for name, before in zip(names, [START, *names], strict=False):
        builder.add_node(name, ask)
        builder.add_edge(before, name)
    return builder.compile(checkpointer=saver)


def contents(saver: InMemorySaver) -> Iterator[bytes]:
    """All that the checkpointer keeps: checkpoints with their metadata, channel values and pending writes."""
    for namespaces in saver.storage.values():
        for checkpoints in namespaces.values():
            for (_, checkpoint), (_, metadata), _parent in checkpoints.values():
                yield from (checkpoint, metadata)
    yield from (content for _, content in saver.blobs.values())
    for writes in saver.writes.values():
        yield from (content for _, _, (_, content), _path in writes.values())


@pytest.mark.parametrize("streams", [False, True])
def test_checkpoints_of_a_recorded_run_are_as_large_as_plain_ones(stub: OpenAIStub, streams: bool) -> None:
    given = {"messages": [HumanMessage("Where is the Nile?", id="h")]}
    config: Any = {"configurable": {"thread_id": "t"}}
    # The stub puts the call's id into the answer's, so plain calls get one as well.
    headers = {HEADER_CALL: str(uuid.uuid4())}
    plain = ChatOpenAI(
        model="desk", base_url=f"{stub.url}/v1", api_key="none", stream_usage=True, default_headers=headers
    )
    plain_saver, saver = InMemorySaver(), InMemorySaver()
    random.seed(0)  # versions of channels end with a random fraction, as long as it happens to be
    plain_state = build(plain, plain_saver, streams=streams).invoke(given, config)
    random.seed(0)
    with record(group_id="g") as run:
        state = build(ChatART(model="desk"), saver, streams=streams).invoke(given, config)
    assert len(run.calls) == NODES

    # All that differs is the name of the provider in the answers' metadata.
    parts = [content.replace(b"langgraph-art", b"openai") for content in contents(saver)]
    assert b"".join(parts).count(b"openai") == b"".join(contents(plain_saver)).count(b"openai") > NODES
    assert sum(map(len, parts)) == sum(map(len, contents(plain_saver))) > 10_000
    assert len(repr(state).replace("langgraph-art", "openai")) == len(repr(plain_state))
