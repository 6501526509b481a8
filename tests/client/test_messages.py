"""What is mended between `ChatOpenAI` and vLLM, over the wire: reasoning, tools, contents, answers that are none."""

from __future__ import annotations

import asyncio
import warnings
from typing import Any

import pytest
from langchain_core.exceptions import ModelAPIError
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from langgraph_art.chat_model import ChatART
from langgraph_art.recording import record

from .openai_stub import OpenAIStub


def weather(city: str) -> str:
    """Weather of a city."""
    return city


def invoked(llm: Any, value: Any) -> BaseMessage:
    return llm.invoke(value)


def ainvoked(llm: Any, value: Any) -> BaseMessage:
    return asyncio.run(llm.ainvoke(value))


def streamed(llm: Any, value: Any) -> BaseMessage:
    return joined(list(llm.stream(value)))


def astreamed(llm: Any, value: Any) -> BaseMessage:
    async def collect() -> list[AIMessageChunk]:
        return [chunk async for chunk in llm.astream(value)]

    return joined(asyncio.run(collect()))


def joined(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    return total


WAYS = pytest.mark.parametrize("call", [invoked, ainvoked, streamed, astreamed])
TWO_WAYS = pytest.mark.parametrize("call", [invoked, astreamed])


# -- reasoning --------------------------------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("output_version", ["v0", "v1"])
def test_reasoning_is_kept_and_sent_back(stub: OpenAIStub, call: Any, output_version: str) -> None:
    llm = ChatART(model="desk", output_version=output_version)
    answer = call(llm, "!think the river is long |the Nile")
    assert answer.text.strip() == "the Nile"
    assert answer.additional_kwargs["reasoning_content"].strip() == "the river is long"
    kinds = [(block["type"], (block.get("text") or block.get("reasoning")).strip()) for block in answer.content_blocks]
    assert kinds == [("reasoning", "the river is long"), ("text", "the Nile")]
    call(llm, [HumanMessage("which river?"), answer, HumanMessage("again")])
    sent = stub.log[-1].body["messages"][1]
    assert sent["reasoning"].strip() == "the river is long"
    text = sent["content"] if isinstance(sent["content"], str) else sent["content"][0]["text"]
    assert text.strip() == "the Nile"
    assert "reasoning" not in stub.log[-1].body["messages"][0]


def test_reasoning_in_a_content_block_is_sent_back(stub: OpenAIStub) -> None:
    said = AIMessage([{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "yes"}])
    only = AIMessage([{"type": "reasoning", "reasoning": "hm"}])
    ChatART(model="desk").invoke([HumanMessage("a"), said, HumanMessage("b"), only, HumanMessage("c")])
    sent = stub.log[0].body["messages"]
    assert (sent[1]["reasoning"], sent[1]["content"]) == ("hm", [{"type": "text", "text": "yes"}])
    assert (sent[3]["reasoning"], sent[3]["content"]) == ("hm", "")


async def test_reasoning_in_event_streams(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk")
    with warnings.catch_warnings(action="ignore"):  # v3 is in beta
        message = await (await llm.astream_events("!think long |Nile", version="v3"))
    assert [block["type"] for block in message.content_blocks] == ["reasoning", "text"]
    assert message.usage_metadata is not None
    *_, end = [event async for event in llm.astream_events("!think long |Nile", version="v2")]
    assert end["data"]["output"].additional_kwargs["reasoning_content"].strip() == "long"


# -- tools and contents -----------------------------------------------------------------------------------------------


@TWO_WAYS
def test_no_tools_are_no_tools(stub: OpenAIStub, call: Any) -> None:
    llm = ChatART(model="desk")
    call(llm.bind_tools([], tool_choice="auto", parallel_tool_calls=False), "hi")
    assert not {"tools", "tool_choice", "parallel_tool_calls"} & stub.log[0].body.keys()
    call(llm.bind_tools([], tool_choice="any"), "hi")
    assert stub.log[1].body["tool_choice"] == "required", "the server has to say that this cannot be"


def test_an_empty_list_of_calls_is_not_sent(stub: OpenAIStub) -> None:
    said = AIMessage("yes", additional_kwargs={"tool_calls": []})
    ChatART(model="desk").invoke([HumanMessage("a"), said, HumanMessage("b")])
    assert "tool_calls" not in stub.log[0].body["messages"][1]


def test_text_blocks_of_tools_become_text_and_others_stay(stub: OpenAIStub) -> None:
    call = {"name": "weather", "args": {"city": "Rome"}, "id": "1"}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    contents: list[Any] = [
        [{"type": "text", "text": "warm"}, {"type": "text", "text": "dry"}],
        ["warm", "dry"],
        [{"type": "text", "text": "see"}, image],
        [],
    ]
    history: list[BaseMessage] = [SystemMessage("s"), HumanMessage([{"type": "text", "text": "hi"}])]
    for content in contents:
        history += [AIMessage("", tool_calls=[call]), ToolMessage(content, tool_call_id="1")]
    ChatART(model="desk").invoke(history)
    sent = stub.log[0].body["messages"]
    assert [message["content"] for message in sent if message["role"] == "tool"] == [
        "warm\ndry",
        "warm\ndry",
        [{"type": "text", "text": "see"}, image],
        "",
    ]
    assert sent[1]["content"] == [{"type": "text", "text": "hi"}]


def test_bind_tools_with_every_option(stub: OpenAIStub) -> None:
    llm = ChatART(model="desk")
    llm.bind_tools([weather], tool_choice="any", strict=True, parallel_tool_calls=False, temperature=0.3).invoke("a")
    llm.bind_tools([weather], tool_choice="weather").invoke("b")
    llm.bind_tools([weather], tool_choice={"type": "function", "function": {"name": "weather"}}).invoke("c")
    llm.bind_tools([weather], tool_choice="none").invoke("d")
    llm.bind_tools([weather], tool_choice=True).invoke("e")
    first, *others = (request.body for request in stub.log)
    assert first["tools"][0]["function"]["strict"] is True
    assert (first["tool_choice"], first["parallel_tool_calls"], first["temperature"]) == ("required", False, 0.3)
    named = {"type": "function", "function": {"name": "weather"}}
    assert [body["tool_choice"] for body in others] == [named, named, "none", "required"]


# -- answers that are none --------------------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("word", ["!nochoices", "!html"])
def test_an_answer_without_choices_is_the_servers_fault(stub: OpenAIStub, call: Any, word: str) -> None:
    with pytest.raises(ModelAPIError, match="check base_url"), record() as run:
        call(ChatART(model="desk"), word)
    assert run.error is not None
    assert run.error.infrastructure
    assert not run.calls[0].delivered


# -- what only OpenAI's servers have ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"include": ["reasoning.encrypted_content"]},
        {"truncation": "auto"},
        {"use_previous_response_id": True},
        {"context_management": [{"type": "compaction"}]},
        {"output_version": "responses/v1"},
        {"use_responses_api": True},
    ],
)
def test_arguments_of_the_responses_api_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(arguments))}.*Responses API"):
        ChatART(model="desk", **arguments)


@TWO_WAYS
def test_options_of_the_responses_api_are_refused_at_the_call(stub: OpenAIStub, call: Any) -> None:
    llm = ChatART(model="desk")
    with pytest.raises(ValueError, match=r"include.*Responses API"):
        call(llm.bind(include=["x"]), "hi")
    with pytest.raises(ValueError, match="'web_search' runs on OpenAI's servers"):
        call(llm.bind_tools([weather, {"type": "web_search"}]), "hi")
    assert stub.log == []


@TWO_WAYS
def test_reasoning_effort_stays_with_chat_completions(stub: OpenAIStub, call: Any) -> None:
    call(ChatART(model="desk", reasoning={"effort": "low", "summary": "auto"}), "hi")
    call(ChatART(model="desk", reasoning_effort="high"), "hi")
    assert [request.body["reasoning_effort"] for request in stub.log] == ["low", "high"]
    assert "reasoning" not in stub.log[0].body


@pytest.mark.parametrize("name", ["gpt-5", "o1-mini", "gpt-6-sol", "gpt-5-codex", "gpt-5.2-pro", "o3"])
def test_a_policys_name_means_nothing_to_the_client(stub: OpenAIStub, name: str) -> None:
    llm = ChatART(model=name, temperature=0.3)
    llm.bind_tools([weather]).invoke([SystemMessage("s"), HumanMessage("hi")])
    ChatART(model=name).invoke("hi")
    set_, unset = (request.body for request in stub.log)
    assert set_["temperature"] == 0.3
    assert "temperature" not in unset
    assert [message["role"] for message in set_["messages"]] == ["system", "user"]
    assert (llm.profile or {}).get("image_inputs") is None, "no profile of OpenAI's model of that name"
