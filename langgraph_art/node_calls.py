"""From LangChain's callbacks to `NodeCall`: one for each call of a chat model or plain LLM, whoever makes it.

Invariant: a call has the id that LangChain gave it and the node that LangGraph gave it; what neither says stays empty,
never a guess from time or text. A call ends once, with its answer or with its error.
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import openai
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage, BaseMessageChunk, HumanMessage, message_chunk_to_message
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.runnables.config import var_child_runnable_config

from langgraph_art import failures
from langgraph_art.runs import NodeCall

_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*@\d+")


_EMPTY = NodeCall(call_id="", node="", model="", messages=[], started_at=datetime.fromtimestamp(0, UTC))
"""What new calls are copies of, which is cheaper than setting each default; no default is mutable."""


class CallHandler(BaseCallbackHandler, ABC):
    """Base of the handlers that write down calls; a subclass says which are its own. Safe under threads.

    It runs inline, in the caller's own task: only so can it tell `ChatART`, which gets no run manager when it streams,
    which call it is making.
    """

    run_inline = True
    raise_error = True  # a call that could not be recorded must not pass unnoticed

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_flight: dict[str, NodeCall] = {}  # by call id

    @abstractmethod
    def _takes(self, call_id: str) -> bool:
        """Whether a call that starts now, in this context, is this handler's."""

    @abstractmethod
    def _add(self, call: NodeCall) -> None:
        """Keep a call that begins."""

    def _ended(self, call: NodeCall, error: BaseException | None) -> None:
        """Note how a call ended. Runs under the lock."""

    def _as_dict(self, message: BaseMessage) -> dict[str, Any]:
        return message.model_dump()

    def has(self, call_id: str) -> bool:
        """Whether this handler has this call and it is in flight."""
        with self._lock:
            return call_id in self._in_flight

    def on_chat_model_start(
        self,
        serialized: dict[str, Any],
        messages: list[list[BaseMessage]],
        *,
        run_id: UUID,
        metadata: dict[str, Any] | None = None,
        invocation_params: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A chat model is called."""
        self._begin(run_id, messages[0], metadata or {}, invocation_params or {})

    def on_llm_start(
        self,
        serialized: dict[str, Any],
        prompts: list[str],
        *,
        run_id: UUID,
        metadata: dict[str, Any] | None = None,
        invocation_params: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A plain LLM, text in and text out, is called."""
        self._begin(run_id, [HumanMessage(prompts[0])], metadata or {}, invocation_params or {})

    def _begin(
        self, run_id: UUID, messages: Sequence[BaseMessage], metadata: Mapping[str, Any], params: Mapping[str, Any]
    ) -> None:
        if not self._takes(str(run_id)):
            return
        namespace = namespace_here(metadata)
        call = _EMPTY.model_copy(  # as validation would copy every message
            update={
                "call_id": str(run_id),
                "node": node_path(namespace),
                "namespace": namespace,
                "model": str(params.get("model") or params.get("model_name") or metadata.get("ls_model_name") or ""),
                "messages": [self._as_dict(message) for message in messages],
                "tools": _tools(params),
                "started_at": now(),
            }
        )
        self._add(call)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """The answer has reached the graph."""
        with self._lock:
            call = self._in_flight.pop(str(run_id), None)
            if call is None:
                return
            call.ended_at, call.delivered = now(), True
            _take_answer(call, response)
            self._ended(call, None)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """The call failed: before its answer came, or after, because the answer could not be used."""
        with self._lock:
            call = self._in_flight.pop(str(run_id), None)
            if call is None:
                return
            call.ended_at, call.delivered = now(), failures.answered(error)
            call.error = failures.describe(error, call.node)
            if isinstance(error, openai.LengthFinishReasonError):
                call.version, call.finish_reason = _version(error.completion.model), "length"
                if (usage := error.completion.usage) is not None:
                    call.usage = _usage(usage.model_dump())
            self._ended(call, error)


def _take_answer(call: NodeCall, response: LLMResult) -> None:
    if not response.generations or not response.generations[0]:
        return
    generation = response.generations[0][0]
    if not isinstance(generation, ChatGeneration):
        call.response = AIMessage(generation.text).model_dump()
        call.usage = _usage((response.llm_output or {}).get("token_usage"))
        return
    message = generation.message
    if isinstance(message, BaseMessageChunk):
        message = message_chunk_to_message(message)
    call.response = message.model_dump()
    call.finish_reason = message.response_metadata.get("finish_reason")
    if call.art:
        call.version = _version(message.response_metadata.get("model_name"))
    if isinstance(message, AIMessage) and message.usage_metadata is not None:
        call.usage = {**message.usage_metadata}


def namespace_of(metadata: Mapping[str, Any]) -> str:
    """LangGraph's checkpoint namespace of a node, such as ``planner:<task>|1|model:<task>``; empty outside any."""
    return str(metadata.get("langgraph_checkpoint_ns") or "")


def namespace_here(metadata: Mapping[str, Any] | None) -> str:
    """The namespace of a call with this metadata, or else, as `generate` takes none over, that of its context."""
    config = var_child_runnable_config.get() or {}
    return namespace_of(metadata or {}) or namespace_of(config.get("metadata") or {})


def node_path(namespace: str) -> str:
    """Node path of a namespace: ``planner:<task>|1|model:<task>`` is ``planner|model``."""
    return "|".join(part.split(":")[0] for part in namespace.split("|") if not part.isdigit())


def now() -> datetime:
    """The time, UTC."""
    return datetime.now(UTC)


def _version(model: object) -> str | None:
    return model if isinstance(model, str) and _VERSION.fullmatch(model) else None


def _tools(params: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools = params.get("tools")
    return tools if isinstance(tools, list) and tools and all(isinstance(tool, dict) for tool in tools) else None


def _usage(counts: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """OpenAI's token counts under LangChain's names; ``None`` if they are not there."""
    names = {"input_tokens": "prompt_tokens", "output_tokens": "completion_tokens", "total_tokens": "total_tokens"}
    if not counts or any(counts.get(name) is None for name in names.values()):
        return None
    return {ours: counts[theirs] for ours, theirs in names.items()}
