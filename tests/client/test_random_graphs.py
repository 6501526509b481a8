"""Random programs: what is recorded is what the nodes asked and what the server saw, call for call."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from langgraph_art.chat_model import ChatART
from langgraph_art.recording import record
from langgraph_art.runs import GraphRun

from ..random_graphs import App, programs
from .graphs import agrees
from .openai_stub import OpenAIStub

# Random programs take their time.
pytestmark = pytest.mark.slow


async def run_both(app: App, graph: Any, mode: str) -> list[GraphRun]:
    """Two recordings of one graph at the same time."""

    async def one(name: str) -> GraphRun:
        given: Any = {"run": name, "log": []}
        with record(run_id=name) as run:
            if mode == "stream" and app.is_async:
                [part async for part in graph.astream(given, stream_mode=["messages", "updates"], subgraphs=True)]
            elif mode == "stream":
                await asyncio.to_thread(lambda: list(graph.stream(given, stream_mode=["messages"], subgraphs=True)))
            elif app.is_async:
                await graph.ainvoke(given)
            else:
                await asyncio.to_thread(graph.invoke, given)
        return run

    return list(await asyncio.gather(one("first"), one("second")))


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(programs(), st.booleans(), st.sampled_from(["whole", "stream"]))
def test_random_programs(stub: OpenAIStub, steps: list[Any], is_async: bool, mode: str) -> None:
    check(stub, steps, is_async, mode)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(programs(), st.booleans(), st.sampled_from(["whole", "stream"]))
def test_many_random_programs(stub: OpenAIStub, steps: list[Any], is_async: bool, mode: str) -> None:
    check(stub, steps, is_async, mode)


def check(stub: OpenAIStub, steps: list[Any], is_async: bool, mode: str) -> None:
    stub.log.clear()
    app = App(ChatART(model="desk"), is_async)
    for run in asyncio.run(run_both(app, app.build(steps), mode)):
        asked = Counter({prompt: count for prompt, count in app.asked.items() if prompt.endswith(f" of {run.run_id}")})
        seen = {
            request.call: (request.body["messages"][0]["content"], request.node) for request in stub.of_run(run.run_id)
        }
        assert Counter(prompt for prompt, _ in seen.values()) == asked
        assert Counter(call.messages[0]["content"] for call in run.calls) == asked
        for call in run.calls:
            prompt = f"{call.node} of {run.run_id}"
            assert seen[call.call_id] == (prompt, call.node)
            assert call.messages[0]["content"] == prompt
            assert call.response is not None
            assert call.response["content"].split() == ["re:", *prompt.split()]
            assert (call.delivered, call.error, call.version) == (True, None, "desk@7")
        assert sum(call.attempt == 2 for call in run.calls) == app.failures[run.run_id]
        assert run.error is None
        agrees(run, stub)
    assert all(request.run for request in stub.log)
