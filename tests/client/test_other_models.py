"""Calls of models that are not ours: recorded under their node, never claimed for training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.language_models import FakeListLLM, GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import Generation, LLMResult
from langchain_openai import ChatOpenAI
from langgraph.cache.memory import InMemoryCache as NodeCache
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import CachePolicy

from langgraph_art.chat_model import ChatART
from langgraph_art.recording import record
from langgraph_art.runs import RunGroup
from langgraph_art.submissions import make_submission

from .graphs import agrees, ask_model, graph_of, said
from .openai_stub import OpenAIStub


def claimed(run: Any) -> set[str]:
    """Ids of the calls that a submission would have trained."""
    run.reward = 1.0
    submission, _ = make_submission([RunGroup(group_id="g", runs=[run])])
    return {claim.call_id for claim in submission.groups[0].runs[0].calls}


async def test_another_chat_model_with_streams_tools_and_usage(stub: OpenAIStub) -> None:
    other = ChatOpenAI(model="gpt", base_url=f"{stub.url}/v1", api_key="k", stream_usage=True)  # type: ignore[arg-type]

    def look(topic: str) -> str:
        """Look a topic up."""
        return topic

    async def mixed(state: MessagesState) -> dict[str, Any]:
        [chunk async for chunk in other.astream("some words")]
        await other.bind_tools([look]).ainvoke('!tool look {"topic": "a"}')
        return {"messages": [await other.ainvoke(state["messages"])]}

    with record() as run:
        await graph_of(mixed=mixed, plan=ask_model).ainvoke(said("hello"))
    streamed, called, whole, ours = run.calls
    assert [(call.node, call.model, call.art, call.delivered) for call in run.calls[:3]] == [
        ("mixed", "gpt", False, True)
    ] * 3
    assert {call.version for call in run.calls[:3]} == {None}, "gpt@7, as it calls itself, is no policy"
    assert streamed.response is not None
    assert (streamed.response["type"], streamed.response["content"].split()) == ("ai", ["re:", "some", "words"])
    assert called.response is not None
    assert called.response["tool_calls"][0]["args"] == {"topic": "a"}
    for call in (streamed, called, whole):
        assert call.usage is not None
        assert call.usage["total_tokens"] > 0
    assert (ours.art, ours.version) == (True, "desk@7")
    assert claimed(run) == {ours.call_id}
    agrees(run, stub)
    assert sum(request.run is None for request in stub.log) == 3, "other models get no headers of ours"


class CountingLLM(FakeListLLM):
    """A plain LLM that reports usage as OpenAI's does."""

    def _generate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
        return LLMResult(generations=[[Generation(text="said")]], llm_output={"token_usage": usage})


async def test_plain_llms_are_recorded_as_one_message_in_and_out(stub: OpenAIStub) -> None:
    counting, streaming = CountingLLM(responses=[]), FakeListLLM(responses=["said more"])

    def plain(state: MessagesState) -> dict[str, Any]:
        counting.invoke("say")
        counting.generate(["one", "two"])
        return {"messages": ["".join(streaming.stream("stream"))]}

    with record() as run:
        await graph_of(plain=plain, plan=ask_model).ainvoke(said("hello"))
    first, one, two, streamed, ours = run.calls
    assert [(message["type"], message["content"]) for message in first.messages] == [("human", "say")]
    assert first.response is not None
    assert (first.response["type"], first.response["content"]) == ("ai", "said")
    assert first.usage == {"input_tokens": 2, "output_tokens": 3, "total_tokens": 5}
    assert [call.messages[0]["content"] for call in (one, two)] == ["one", "two"]
    assert (streamed.response and streamed.response["content"], streamed.usage) == ("said more", None)
    assert {call.node for call in run.calls[:4]} == {"plain"}
    assert claimed(run) == {ours.call_id}


async def test_a_fallback_to_another_model(stub: OpenAIStub) -> None:
    """The answer that failed does not train, and neither does the other model's, which reached the graph."""
    other = GenericFakeChatModel(messages=iter([AIMessage("from the other")]))
    llm = ChatART(model="desk", max_retries=0).with_fallbacks([other])

    async def plan(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await llm.ainvoke(state["messages"])]}

    with record() as run:
        await graph_of(plan=plan).ainvoke(said("!500"))
    assert [(call.node, call.art, call.delivered) for call in run.calls] == [
        ("plan", True, False),
        ("plan", False, True),
    ]
    assert run.output["messages"][-1].content == "from the other"
    assert run.error is None
    agrees(run, stub)


@pytest.fixture
def cached() -> Iterator[None]:
    set_llm_cache(InMemoryCache())
    yield
    set_llm_cache(None)


def test_answers_from_a_cache(stub: OpenAIStub, cached: None) -> None:
    """Another model's cached answer is a call like any other; `ChatART` asks again; a cached node makes no call."""
    other = ChatOpenAI(model="gpt", base_url=f"{stub.url}/v1", api_key="k")  # type: ignore[arg-type]
    ours = ChatART(model="desk")
    with record() as run:
        for model in (other, other, ours, ours):
            model.invoke("hello")
    assert [call.art for call in run.calls] == [False, False, True, True]
    assert len(stub.log) == 3
    agrees(run, stub)

    builder = StateGraph(MessagesState)
    builder.add_node("plan", ask_model, cache_policy=CachePolicy())
    builder.add_edge(START, "plan")
    graph = builder.compile(cache=NodeCache())
    with record() as first:
        graph.invoke({"messages": [{"role": "user", "content": "hello", "id": "m"}]})
    with record() as second:
        state = graph.invoke({"messages": [{"role": "user", "content": "hello", "id": "m"}]})
    assert state["messages"][-1].content == "re: hello"
    assert (len(first.calls), second.calls) == (1, [])


def test_an_error_of_another_model(stub: OpenAIStub) -> None:
    class Broken(GenericFakeChatModel):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            raise httpx.ConnectError("away")

    def plan(state: MessagesState) -> dict[str, Any]:
        return {"messages": [Broken(messages=iter([])).invoke("x")]}

    with pytest.raises(httpx.ConnectError), record() as run:
        graph_of(plan=plan).invoke(said("hello"))
    assert run.error is not None
    assert (run.error.node, run.error.infrastructure, run.calls[0].delivered) == ("plan", True, False)
