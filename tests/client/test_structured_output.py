"""Structured output over the wire: what fits, what does not, and what was cut, in every way to call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypedDict

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk
from pydantic import BaseModel

from langgraph_art.chat_model import ChatART
from langgraph_art.recording import record

from .openai_stub import OpenAIStub


class Verdict(BaseModel):
    """A verdict."""

    good: bool
    why: str = ""


class VerdictDict(TypedDict):
    """A verdict."""

    good: bool


SCHEMA = {**Verdict.model_json_schema(), "title": "Verdict"}


def last(outputs: list[Any]) -> Any:
    return outputs[-1]


def merged(outputs: list[Any]) -> Any:
    """What a stream of dicts adds up to: the last value of every key, messages joined."""
    total: dict[str, Any] = {}
    for part in outputs:
        for key, value in part.items():
            total[key] = total[key] + value if key == "raw" and key in total else value
    return total


def invoked(chain: Any, text: str, _: Any) -> Any:
    return chain.invoke(text)


def ainvoked(chain: Any, text: str, _: Any) -> Any:
    return asyncio.run(chain.ainvoke(text))


def streamed(chain: Any, text: str, join: Callable[[list[Any]], Any]) -> Any:
    return join(list(chain.stream(text)))


def astreamed(chain: Any, text: str, join: Callable[[list[Any]], Any]) -> Any:
    async def collect() -> list[Any]:
        return [part async for part in chain.astream(text)]

    return join(asyncio.run(collect()))


WAYS = pytest.mark.parametrize("call", [invoked, ainvoked, streamed, astreamed])


# -- what fits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (Verdict, Verdict(good=True)),
        (VerdictDict, {"good": True}),
        (SCHEMA, {"good": True}),
        ({"name": "Verdict", "schema": SCHEMA}, {"good": True}),
    ],
)
@pytest.mark.parametrize(
    ("call", "method"),
    [(invoked, "json_schema"), (astreamed, "json_schema"), (ainvoked, "json_mode"), (streamed, "json_mode")],
)
def test_an_answer_that_fits(stub: OpenAIStub, call: Any, method: Any, schema: Any, expected: Any) -> None:
    llm = ChatART(model="desk")
    assert call(llm.with_structured_output(schema, method=method), '!json {"good": true}', last) == expected
    whole = call(llm.with_structured_output(schema, method=method, include_raw=True), '!json {"good": true}', merged)
    assert (whole["parsed"], whole["parsing_error"]) == (expected, None)
    assert json.loads(whole["raw"].text) == {"good": True}
    assert whole["raw"].usage_metadata["output_tokens"] == 2
    (first, second) = stub.log
    assert first.body["response_format"] == second.body["response_format"]
    assert first.body["response_format"]["type"] == ("json_schema" if method == "json_schema" else "json_object")


@WAYS
@pytest.mark.parametrize(("schema", "include_raw"), [(Verdict, False), (VerdictDict, True), (SCHEMA, True)])
def test_function_calling(stub: OpenAIStub, call: Any, schema: Any, include_raw: bool) -> None:
    name = "VerdictDict" if schema is VerdictDict else "Verdict"
    chain = ChatART(model="desk").with_structured_output(schema, method="function_calling", include_raw=include_raw)
    result = call(chain, f'!tool {name} {{"good": true}}', merged if include_raw else last)
    parsed = result["parsed"] if include_raw else result
    assert parsed == (Verdict(good=True) if schema is Verdict else {"good": True})
    assert stub.log[0].body["tool_choice"] == {"type": "function", "function": {"name": name}}


def test_strict_and_tools_reach_the_server(stub: OpenAIStub) -> None:
    def weather(city: str) -> str:
        """Weather of a city."""
        return city

    llm = ChatART(model="desk")
    chain = llm.with_structured_output(Verdict, tools=[weather], strict=True, include_raw=True)
    chosen = chain.invoke('!tool weather {"city": "Rome"}')
    assert (chosen["parsed"], chosen["parsing_error"]) == (None, None)
    assert chosen["raw"].tool_calls[0]["args"] == {"city": "Rome"}
    body = stub.log[0].body
    assert body["tools"][0]["function"]["strict"] is True
    assert body["response_format"]["json_schema"]["strict"] is True
    llm.with_structured_output(VerdictDict, strict=True).invoke('!json {"good": true}')
    assert stub.log[1].body["response_format"]["json_schema"]["strict"] is True


@WAYS
def test_parsed_is_where_chatopenai_has_it(stub: OpenAIStub, call: Any) -> None:
    def joined(chunks: list[AIMessageChunk]) -> AIMessageChunk:
        total = chunks[0]
        for chunk in chunks[1:]:
            total += chunk
        return total

    llm = ChatART(model="desk").bind_tools([], response_format=Verdict)
    assert call(llm, '!json {"good": true}', joined).additional_kwargs["parsed"] == Verdict(good=True)
    assert "parsed" not in call(llm, "!json nonsense", joined).additional_kwargs
    assert "parsed" not in call(llm, '!cut {"good":', joined).additional_kwargs


def test_a_stream_of_dicts_grows(stub: OpenAIStub) -> None:
    chain = ChatART(model="desk").with_structured_output(VerdictDict)
    parts = list(chain.stream('!json { "good": true , "why": "a b" }'))
    assert len(parts) > 2
    assert parts[-1] == {"good": True, "why": "a b"}


# -- what does not ----------------------------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize(
    ("method", "schema"), [("json_schema", Verdict), ("json_mode", VerdictDict), ("function_calling", Verdict)]
)
def test_a_cut_answer_is_a_parsing_error_of_a_delivered_call(
    stub: OpenAIStub, call: Any, method: Any, schema: Any
) -> None:
    cut = '{"good": true, "why": "it rea'  # LangChain's JSON parser would complete it
    llm = ChatART(model="desk")
    chain = llm.with_structured_output(schema, method=method)
    with pytest.raises(OutputParserException, match=r"cut at the token limit.*it rea") as raised, record() as run:
        call(chain, f"!cut {cut}", last)
    assert raised.value.llm_output is not None
    assert raised.value.llm_output.strip() == cut
    (made,) = run.calls
    assert (made.delivered, made.version, made.finish_reason, made.error) == (True, "desk@7", "length", None)
    assert made.usage is not None
    assert run.error is not None
    assert not run.error.infrastructure

    whole = call(llm.with_structured_output(schema, method=method, include_raw=True), f"!cut {cut}", merged)
    assert whole["parsed"] is None
    assert isinstance(whole["parsing_error"], OutputParserException)
    assert isinstance(whole["raw"], AIMessage)
    assert whole["raw"].response_metadata["finish_reason"] == "length"


@WAYS
def test_an_answer_that_is_whole_at_the_limit_is_no_error(stub: OpenAIStub, call: Any) -> None:
    chain = ChatART(model="desk").with_structured_output(Verdict)
    assert call(chain, '!cut {"good": true}', last) == Verdict(good=True)


@WAYS
def test_an_answer_of_another_shape_is_a_parsing_error(stub: OpenAIStub, call: Any) -> None:
    llm = ChatART(model="desk")
    with pytest.raises(OutputParserException, match="no Verdict") as raised, record() as run:
        call(llm.with_structured_output(Verdict), '!json {"bad": 1}', last)
    assert (raised.value.llm_output or "").strip() == '{"bad": 1}'
    assert run.calls[0].delivered
    whole = call(llm.with_structured_output(Verdict, include_raw=True), '!json {"bad": 1}', merged)
    assert isinstance(whole["parsing_error"], OutputParserException)


def test_retries_and_fallbacks_see_the_parsing_error(stub: OpenAIStub) -> None:
    chain = ChatART(model="desk").with_structured_output(Verdict)
    retried = chain.with_retry(
        retry_if_exception_type=(OutputParserException,), stop_after_attempt=2, wait_exponential_jitter=False
    )
    with pytest.raises(OutputParserException), record() as run:
        retried.invoke('!cut {"good":')
    assert [made.delivered for made in run.calls] == [True, True]
    fallback = chain.with_fallbacks([ChatART(model="other")], exceptions_to_handle=(OutputParserException,))
    assert fallback.invoke('!cut {"good":').response_metadata["model_name"] == "other@7"


@pytest.mark.parametrize("name", ["gpt-4", "gpt-4-0613", "gpt-3.5-turbo"])
@pytest.mark.filterwarnings("error")
def test_no_other_method_for_policies_of_some_names(stub: OpenAIStub, name: str) -> None:
    assert ChatART(model=name).with_structured_output(Verdict).invoke('!json {"good": true}') == Verdict(good=True)
    assert stub.log[0].body["response_format"]["type"] == "json_schema"
    assert stub.log[0].body["model"] == name
