from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
from langchain_core.messages import AIMessage
from langgraph.graph import START, MessagesState, StateGraph

from langgraph_art import node_call, record

from .openai_stub import OpenAIStub

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def one_node(node: Any) -> Any:
    builder = StateGraph(MessagesState)
    builder.add_node("say", node)
    builder.add_edge(START, "say")
    return builder.compile()


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_the_sdk_in_a_node(stub: OpenAIStub) -> None:
    client = openai.OpenAI(base_url=f"{stub.url}/v1", api_key="k", max_retries=1)

    def say(state: MessagesState) -> dict[str, Any]:
        options: dict[str, Any] = {"temperature": 0.2, "top_p": 0.5, "tools": [TOOL]}
        with node_call(model="p", messages=user("!tool look {}"), extra_headers={"x-mine": "1"}, **options) as call:
            answer = client.chat.completions.create(**call.request)
            call.answer(answer)
        with node_call(model="p", messages=user("!flaky")) as call:
            call.answer(client.chat.completions.create(**call.request))
        return {"messages": [AIMessage(answer.choices[0].message.tool_calls[0].function.name)]}

    with record(group_id="g", sampling={"temperature": 1.0, "top_p": None}) as run:
        one_node(say).invoke({"messages": []})
    first, second = run.calls
    assert (first.node, first.model, first.version, first.art, first.delivered) == ("say", "p", "p@7", True, True)
    assert first.messages[0]["content"] == "!tool look {}"
    assert first.response is not None
    assert first.response["tool_calls"][0]["name"] == "look"
    assert first.usage is not None
    assert first.usage["input_tokens"] == 3
    assert first.finish_reason == "tool_calls"
    assert second.delivered
    assert [(r.run, r.group, r.node, r.call, r.attempt) for r in stub.log] == [
        (run.run_id, "g", "say", first.call_id, 0),
        (run.run_id, "g", "say", second.call_id, 0),
        (run.run_id, "g", "say", second.call_id, 1),
    ]
    assert stub.log[0].body["temperature"] == 1.0
    assert "top_p" not in stub.log[0].body
    assert stub.log[0].headers["x-mine"] == "1"


async def test_async_and_at_once(stub: OpenAIStub) -> None:
    client = openai.AsyncOpenAI(base_url=f"{stub.url}/v1", api_key="k")

    async def one(text: str) -> str:
        with node_call(model="p", messages=user(text)) as call:
            parts = [
                chunk.choices[0].delta.content or ""
                async for chunk in await client.chat.completions.create(**call.request, stream=True)
                if chunk.choices
            ]
            call.answer("".join(parts))
        return "".join(parts)

    async def say(state: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage(text) for text in await asyncio.gather(*map(one, "abc"))]}

    with record() as run:
        parts = [m async for m, _ in one_node(say).astream({"messages": []}, stream_mode="messages")]
    await client.close()
    assert {message.text.strip() for message in parts} >= {"re: a", "re: b", "re: c"}
    assert [(call.node, call.delivered) for call in run.calls] == [("say", True)] * 3
    by_id = {request.call: request.body["messages"][0]["content"] for request in stub.log}
    assert [by_id[call.call_id] for call in run.calls] == [call.messages[0]["content"] for call in run.calls]


def test_any_http_client(stub: OpenAIStub) -> None:
    def say(state: MessagesState) -> dict[str, Any]:
        with node_call(model="p", messages=user("hi")) as call:
            body = {"model": "p", "messages": user("hi")}
            answer = httpx.post(f"{stub.url}/v1/chat/completions", json=body, headers=call.headers).json()
            call.answer(answer)
        with node_call(model="p", messages=user("unsaid")) as call:
            httpx.post(f"{stub.url}/v1/chat/completions", json=body, headers=call.headers)
        return {"messages": []}

    with record() as run:
        one_node(say).invoke({"messages": []})
    assert run.calls[0].response is not None
    assert run.calls[0].response["content"] == "re: hi"
    assert [(call.delivered, call.art) for call in run.calls] == [(True, True)] * 2
    assert run.calls[1].response is None
    assert [request.call for request in stub.log] == [call.call_id for call in run.calls]


def test_a_call_that_fails(stub: OpenAIStub) -> None:
    client = openai.OpenAI(base_url=f"{stub.url}/v1", api_key="k", max_retries=0)

    def say(state: MessagesState) -> dict[str, Any]:
        with node_call(model="p", messages=user("!500")) as call:
            client.chat.completions.create(**call.request)
        return {"messages": []}

    with pytest.raises(openai.InternalServerError), record() as run:
        one_node(say).invoke({"messages": []})
    (made,) = run.calls
    assert made.error is not None
    assert (made.delivered, made.error.infrastructure, made.error.node) == (False, True, "say")


def test_outside_a_recording(stub: OpenAIStub) -> None:
    client = openai.OpenAI(base_url=f"{stub.url}/v1", api_key="k")
    with node_call(model="p", messages=user("hi")) as call:
        client.chat.completions.create(**call.request)
    assert stub.log[0].call
    assert stub.log[0].run is None
