"""Mends what goes to the engine and what comes back, where `ChatOpenAI` and vLLM disagree.

Invariant: nothing that the model said is lost, and nothing that the app said is changed in meaning. Reasoning is kept
in ``additional_kwargs["reasoning_content"]``, where LangChain looks for it, and goes back as ``reasoning``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.exceptions import ModelAPIError
from langchain_core.messages import AIMessage, BaseMessage, InvalidToolCall
from langchain_core.output_parsers.openai_tools import make_invalid_tool_call
from openai.lib import type_to_response_format_param

RESPONSES_ONLY = frozenset({"context_management", "include", "previous_response_id", "text", "truncation"})
"""Request options that only OpenAI's Responses API has."""


def prepare(payload: dict[str, Any], messages: Sequence[BaseMessage]) -> None:
    """Make `ChatOpenAI`'s request one that vLLM takes, in place.

    Args:
        payload: keyword arguments of the SDK's ``chat.completions.create``.
        messages: what ``payload["messages"]`` was made from, one by one.

    Raises:
        ValueError: the request needs OpenAI's Responses API.
    """
    if unknown := sorted(RESPONSES_ONLY & payload.keys()):
        raise ValueError(
            f"ChatART: {', '.join(unknown)} is of OpenAI's Responses API, the server has none; leave it out"
        )
    for message, sent in zip(messages, payload["messages"], strict=True):
        if isinstance(message, AIMessage) and (reasoning := _reasoning(message)):
            sent["reasoning"] = reasoning
        if sent.get("tool_calls") == []:  # chat templates take it for a call
            del sent["tool_calls"]
        if sent["role"] == "tool" or sent.get("content") == []:
            sent["content"] = _as_text(sent["content"])
    _prepare_tools(payload)
    if "reasoning" in payload:
        effort = (payload.pop("reasoning") or {}).get("effort")
        if effort is not None:
            payload.setdefault("reasoning_effort", effort)
    if "response_format" in payload:
        # Where the SDK sees a format it parses the answer itself, and an answer that is cut or wrong is lost in its
        # exception. LangChain's own parsers come later.
        response_format = type_to_response_format_param(payload.pop("response_format"))
        payload["extra_body"] = {**(payload.get("extra_body") or {}), "response_format": response_format}


def _prepare_tools(payload: dict[str, Any]) -> None:
    for tool in payload.get("tools") or []:
        if tool.get("type", "function") != "function":
            raise ValueError(
                f"ChatART: a tool of type {tool['type']!r} runs on OpenAI's servers, the server has only function "
                "tools; bind a function instead"
            )
    if payload.get("tools") == []:  # vLLM refuses it, and options for tools without tools
        del payload["tools"]
        payload.pop("parallel_tool_calls", None)
        if payload.get("tool_choice") in ("auto", "none"):
            del payload["tool_choice"]


def _reasoning(message: AIMessage) -> str:
    kept = message.additional_kwargs.get("reasoning_content")
    if isinstance(kept, str):
        return kept
    blocks = message.content if isinstance(message.content, list) else []
    return "".join(
        str(block.get("reasoning") or "")
        for block in blocks
        if isinstance(block, dict) and block.get("type") == "reasoning"
    )


def _as_text(content: Any) -> Any:
    """Text blocks as one text: many chat templates put a list of blocks into the prompt as Python writes it."""
    if not isinstance(content, list):
        return content
    texts = [block if isinstance(block, str) else block.get("text") for block in content]
    return content if None in texts else "\n".join(texts)


def require_choices(response: Any) -> None:
    """Check that the server answered a chat completion.

    Raises:
        ModelAPIError: it did not; the answer's beginning is in the message.
    """
    choices = response.get("choices") if isinstance(response, Mapping) else getattr(response, "choices", None)
    if not isinstance(choices, list):
        raise ModelAPIError(
            "the server's answer is no chat completion, it has no choices: check base_url and what stands between. "
            f"It begins: {str(response)[:300]}"
        )


def keep_reasoning(message: BaseMessage, said: Any) -> None:
    """Put the reasoning of an answer, or of a part of it, into the message made of it."""
    fields = said if isinstance(said, Mapping) else said.model_extra or {}
    if reasoning := fields.get("reasoning") or fields.get("reasoning_content"):
        message.additional_kwargs["reasoning_content"] = reasoning


def without_invalid_tool_calls(response: Any) -> tuple[Any, dict[int, list[InvalidToolCall]]]:
    """The response without tool calls whose arguments are JSON but no object, and these calls by choice.

    `ChatOpenAI` would raise on them, which kills the graph over something that small models do all the time.
    """
    invalid: dict[int, list[InvalidToolCall]] = {}
    for index, choice in enumerate(response.choices):
        for call in choice.message.tool_calls or []:
            arguments = call.function.arguments if call.type == "function" else None
            if arguments and not _langchain_takes(arguments):
                error = f"Tool {call.function.name!r}: arguments must be a JSON object, got {arguments}"
                invalid.setdefault(index, []).append(make_invalid_tool_call(call.model_dump(), error))
    if not invalid:
        return response, invalid
    response = response.model_copy(deep=True)
    for index, calls in invalid.items():
        message, ids = response.choices[index].message, {call["id"] for call in calls}
        message.tool_calls = [call for call in message.tool_calls if call.id not in ids]
    return response, invalid


def _langchain_takes(arguments: str) -> bool:
    """Whether LangChain handles these arguments itself: objects, ``null`` (no arguments), and what is no JSON."""
    try:
        parsed = json.loads(arguments, strict=False)
    except ValueError:
        return True
    return parsed is None or isinstance(parsed, dict)
