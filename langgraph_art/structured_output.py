"""Structured output is parsed after the answer has arrived, never by the SDK on the way.

Invariant: an answer that was cut at the token limit, or that does not fit its schema, is an `OutputParserException`
from the parser: the call itself has succeeded, ``include_raw=True`` holds both, and retries and fallbacks around the
parser see the error they expect. `ChatOpenAI` loses such an answer in an exception of the OpenAI SDK.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any, TypeGuard

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig, RunnableGenerator, RunnableLambda, RunnableMap
from pydantic import BaseModel, ValidationError


def is_model(schema: Any) -> TypeGuard[type[BaseModel]]:
    """Whether a schema is a pydantic class, which LangChain returns an instance of."""
    return isinstance(schema, type) and issubclass(schema, BaseModel)


def structured(
    model: Runnable[LanguageModelInput, Any],
    parser: Runnable[Any, Any],
    *,
    include_raw: bool,
) -> Runnable[LanguageModelInput, Any]:
    """A model and what turns its message into the output, as ``with_structured_output`` returns it."""
    parser = RunnableGenerator(_not_cut, _anot_cut) | parser
    if not include_raw:
        return model | parser

    # Not LangChain's fallback, which cannot step in once a stream has begun.
    def parse(whole: dict[str, Any], config: RunnableConfig) -> dict[str, Any]:
        try:
            return {**whole, "parsed": parser.invoke(whole["raw"], config), "parsing_error": None}
        except Exception as error:
            return {**whole, "parsed": None, "parsing_error": error}

    async def aparse(whole: dict[str, Any], config: RunnableConfig) -> dict[str, Any]:
        try:
            return {**whole, "parsed": await parser.ainvoke(whole["raw"], config), "parsing_error": None}
        except Exception as error:
            return {**whole, "parsed": None, "parsing_error": error}

    return RunnableMap(raw=model) | RunnableLambda(parse, aparse)


def into(schema: type[BaseModel]) -> Runnable[AIMessage, BaseModel | None]:
    """The parser of JSON text into a pydantic class."""
    return RunnableLambda(partial(_parse, schema=schema)).with_types(output_type=schema)


def attach_parsed(message: BaseMessage, text: str, schema: Any) -> bool:
    """Put the parsed answer where `ChatOpenAI` has it, ``additional_kwargs["parsed"]``, if it fits the schema.

    Args:
        message: the answer, or a last part of it.
        text: text of the whole answer.
        schema: ``response_format`` of the call, whatever that is.

    Returns:
        Whether it was put there. A parser behind the model says why not.
    """
    if not is_model(schema):
        return False
    try:
        message.additional_kwargs["parsed"] = schema.model_validate_json(text)
    except ValidationError:
        return False
    return True


def _parse(message: AIMessage, schema: type[BaseModel]) -> BaseModel | None:
    if message.tool_calls:  # with tools=...: the model has chosen one instead of an answer
        return None
    try:
        return schema.model_validate_json(message.text)
    except ValidationError as error:
        raise OutputParserException(
            f"the answer is no {schema.__name__}: {error}", llm_output=str(message.text)
        ) from error


def _not_cut(messages: Iterator[BaseMessage]) -> Iterator[BaseMessage]:
    whole: BaseMessage | None = None
    for message in messages:
        whole = message if whole is None else _plus(whole, message)
        yield message
    _raise_if_cut(whole)


async def _anot_cut(messages: AsyncIterator[BaseMessage]) -> AsyncIterator[BaseMessage]:
    whole: BaseMessage | None = None
    async for message in messages:
        whole = message if whole is None else _plus(whole, message)
        yield message
    _raise_if_cut(whole)


def _plus(left: Any, right: Any) -> BaseMessage:
    whole: BaseMessage = left + right
    return whole


def _raise_if_cut(message: BaseMessage | None) -> None:
    """LangChain's parsers complete cut JSON, so they must not get to see it."""
    if not isinstance(message, AIMessage) or message.response_metadata.get("finish_reason") != "length":
        return
    calls = message.tool_call_chunks if isinstance(message, AIMessageChunk) else message.invalid_tool_calls
    said = str(calls[0]["args"] if calls else message.text)
    try:
        json.loads(said)
    except ValueError as error:
        raise OutputParserException(
            f"the structured output was cut at the token limit; raise max_tokens or ask for less. It ends: "
            f"{said[-80:]!r}",
            llm_output=said,
        ) from error
