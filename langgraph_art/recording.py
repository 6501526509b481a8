"""Recording: one `GraphRun` of everything that happens inside a ``with record()`` block.

Invariant: a call belongs to exactly one run (that of the innermost open recording) and to the node whose checkpoint
namespace LangGraph gave it; never a guess from time or text. A recording ends with its block: what comes later is not
in it, and what is still in flight then is kept as not delivered.

The recorder is a LangChain callback handler that LangChain itself attaches to every run started inside the block, so
graphs compiled long before are recorded too. It runs inline, in the caller's own task: only so can it tell `ChatART`,
which gets no run manager when it streams, which call it is making.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote
from uuid import UUID

import openai
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.callbacks.manager import BaseRunManager
from langchain_core.messages import AIMessage, BaseMessage, BaseMessageChunk, message_chunk_to_message
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tracers.context import register_configure_hook

from langgraph_art import failures
from langgraph_art.protocol import HEADER_CALL, HEADER_GROUP, HEADER_NODE, HEADER_RUN
from langgraph_art.runs import GraphRun, NodeCall

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:~-]{0,127}")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*@\d+")

SAMPLING_PARAMETERS = frozenset(
    {"temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop", "max_tokens"}
)
"""Sampling parameters of OpenAI's API that a recording may override."""
ENGINE_SAMPLING_PARAMETERS = frozenset(
    {"top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "bad_words", "ignore_eos"}
)
"""Sampling parameters that only the engine knows; they travel in the request's extra body."""


@contextmanager
def record(
    *,
    run_id: str | None = None,
    group_id: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    sampling: Mapping[str, Any] | None = None,
) -> Iterator[GraphRun]:
    """Record everything that LangGraph and LangChain do inside the block as one graph run.

    Works in sync and async code, for any graph, compiled before or inside. Several invocations in one block, such as
    an interrupt and its resume, are one run: the first one's input, the last one's output. Recordings may run
    concurrently and may be nested; the innermost owns a call. The block's context must reach the graph: where you hand
    the graph to a plain thread pool, submit ``contextvars.copy_context().run``.

    Args:
        run_id: id of the run, at most 128 letters, digits and ``._:~-``; a new UUID by default.
        group_id: id of the group of runs of the same input, with the same alphabet.
        metadata: kept with the run as it is.
        sampling: sampling parameters for the calls that `ChatART` makes in this recording, over the app's own
            settings, such as ``{"temperature": 1.0, "top_p": 1.0}``; ``None`` as a value removes the app's setting.
            By default the app's settings are untouched.

    Yields:
        The run. Calls appear while they are made; it is complete when the block ends. If an exception leaves the
        block, ``error`` is set, the calls so far are kept, and the exception goes on.

    Raises:
        ValueError: an id has other characters, or a sampling parameter is unknown.
    """
    for name, value in (("run_id", run_id), ("group_id", group_id)):
        if value is not None and not _ID.fullmatch(value):
            raise ValueError(f"record({name}={value!r}): use at most 128 letters, digits and any of ._:~-")
    if unknown := sorted(set(sampling or ()) - SAMPLING_PARAMETERS - ENGINE_SAMPLING_PARAMETERS):
        known = ", ".join(sorted(SAMPLING_PARAMETERS | ENGINE_SAMPLING_PARAMETERS))
        raise ValueError(f"record(sampling=...): unknown parameter {', '.join(unknown)}. Known are: {known}")
    run = GraphRun(run_id=run_id or str(uuid.uuid4()), group_id=group_id, metadata=dict(metadata or {}))
    recorder = Recorder(run, dict(sampling or {}), outer=_current.get())
    _current.set(recorder)
    try:
        yield run
    except BaseException as error:
        recorder.fail(error)
        raise
    finally:
        # Set, not reset by token: a block inside an async generator may end in another context than it began in.
        _current.set(recorder.outer)
        recorder.close()


class Recorder(BaseCallbackHandler):
    """Turns the callbacks of one recording into its `GraphRun`. Made by `record`; safe under threads."""

    run_inline = True
    raise_error = True  # a call that could not be recorded must not pass unnoticed

    def __init__(self, run: GraphRun, sampling: dict[str, Any], *, outer: Recorder | None) -> None:
        self.run = run
        self.sampling = sampling
        self.outer = outer
        self._lock = threading.Lock()
        self._closed = False
        self._open: dict[UUID, str] = {}  # chain runs in progress -> node path
        self._calls: dict[str, NodeCall] = {}  # calls in flight, by call id
        self._roots: set[UUID] = set()  # graph invocations in progress
        self._roots_are_graphs = False
        self._raised: dict[int, tuple[BaseException, str]] = {}  # exception -> deepest node; holds it, so ids stay
        self._dicts: dict[int, tuple[BaseMessage, dict[str, Any]]] = {}  # likewise, message -> its dict

    # -- graph invocations --------------------------------------------------------------------------------------------

    def on_chain_start(
        self,
        serialized: dict[str, Any] | None,
        inputs: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A graph, a node or a step inside one begins."""
        metadata = metadata or {}
        if not self._owns():
            return
        with self._lock:
            if self._closed:
                return
            is_graph = metadata.get("ls_integration") == "langgraph" and "langgraph_node" not in metadata
            is_top = parent_run_id not in self._open
            self._open[run_id] = node_path(metadata)
            if is_graph and not self._roots_are_graphs:  # until now there were only the chains around this graph
                self._roots_are_graphs = True
                self._roots = set()
                self.run.input, self.run.output = inputs, None
            elif not self._roots_are_graphs and is_top and self.run.input is None:
                self.run.input = inputs
            if is_graph or (is_top and not self._roots_are_graphs):
                self._roots.add(run_id)

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """It ends; the last graph invocation gives the run's output."""
        with self._lock:
            self._open.pop(run_id, None)
            if run_id in self._roots and not self._closed:
                self._roots.discard(run_id)
                self.run.output = outputs

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """It fails; the first to report an exception is the deepest node it was raised in."""
        with self._lock:
            node = self._open.pop(run_id, "")
            if node and not self._closed:
                self._raised.setdefault(id(error), (error, node))
            if run_id in self._roots and not self._closed:
                self._roots.discard(run_id)
                self.run.output = None

    # -- model calls --------------------------------------------------------------------------------------------------

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
        """A chat model is called: the call begins, and the context knows it."""
        metadata, params = metadata or {}, invocation_params or {}
        if not self._owns():
            return
        model = str(params.get("model") or params.get("model_name") or metadata.get("ls_model_name") or "")
        with self._lock:
            if self._closed:
                return
            call = NodeCall.model_construct(  # as validation would copy every message
                call_id=str(run_id),
                node=node_path(metadata),
                model=model,
                messages=[self._as_dict(message) for message in messages[0]],
                started_at=_now(),
            )
            self.run.calls.append(call)
            self._calls[call.call_id] = call
        if self.outer is not None:
            self.outer.release(call.call_id)
        _call.set(CallScope(call.call_id, call.node, self))

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """The answer has reached the graph."""
        generation = response.generations[0][0] if response.generations and response.generations[0] else None
        message = generation.message if isinstance(generation, ChatGeneration) else None
        with self._lock:
            call = self._calls.pop(str(run_id), None)
            if call is None:
                return
            call.ended_at, call.delivered = _now(), True
            if message is None:
                return
            if isinstance(message, BaseMessageChunk):
                message = message_chunk_to_message(message)
            call.response = message.model_dump()
            call.finish_reason = message.response_metadata.get("finish_reason")
            call.version = _version(message.response_metadata.get("model_name"))
            if isinstance(message, AIMessage) and message.usage_metadata is not None:
                call.usage = {**message.usage_metadata}

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """The call failed: before its answer came, or after, because the answer could not be used."""
        with self._lock:
            call = self._calls.pop(str(run_id), None)
            if call is None:
                return
            call.ended_at, call.delivered = _now(), failures.answered(error)
            call.error = failures.describe(error, call.node)
            if call.node:
                self._raised.setdefault(id(error), (error, call.node))
            if isinstance(error, openai.LengthFinishReasonError):
                call.version, call.finish_reason = _version(error.completion.model), "length"
                if (usage := error.completion.usage) is not None:
                    call.usage = {
                        "input_tokens": usage.prompt_tokens,
                        "output_tokens": usage.completion_tokens,
                        "total_tokens": usage.total_tokens,
                    }

    # -- for `record` and `ChatART` -----------------------------------------------------------------------------------

    def has(self, call_id: str) -> bool:
        """Whether this call is in flight in this recording."""
        with self._lock:
            return call_id in self._calls

    def sent(self, call_id: str) -> None:
        """Note that `ChatART` makes this call."""
        with self._lock:
            if call_id in self._calls:
                self._calls[call_id].art = True

    def release(self, call_id: str) -> None:
        """Give a call up to a recording inside this one. Both see it where a thread has no context of its own."""
        with self._lock:
            call = self._calls.pop(call_id, None)
            if call is not None:
                self.run.calls.remove(call)
        if self.outer is not None:
            self.outer.release(call_id)

    def fail(self, error: BaseException) -> None:
        """Note the exception that leaves the block."""
        with self._lock:
            nodes = (self._raised[id(link)][1] for link in failures.causes(error) if id(link) in self._raised)
            self.run.error = failures.describe(error, next(nodes, None))
            self.run.output = None

    def close(self) -> None:
        """End the recording; calls in flight stay, as not delivered."""
        with self._lock:
            self._closed = True
            self.run.ended_at = _now()
            for call in self._calls.values():
                call.ended_at = self.run.ended_at
            self._calls.clear()
            self._open.clear()
            self._raised.clear()
            self._dicts.clear()

    def _as_dict(self, message: BaseMessage) -> dict[str, Any]:
        """The message as a dict, the same one as long as it is unchanged: a history is dumped and kept only once."""
        known = self._dicts.get(id(message))
        if known is not None and known[1] == message.__dict__:
            return known[1]
        data = message.model_dump()
        self._dicts[id(message)] = (message, data)
        return data

    def _owns(self) -> bool:
        """Whether what starts now, in this context, belongs to this recording and not to one inside it."""
        current = _current.get()
        return not self._closed and (current is None or current is self or current._closed)


@dataclass(frozen=True, slots=True)
class CallScope:
    """The model call that is being made in the current context."""

    call_id: str
    node: str
    recorder: Recorder | None
    """The recording that it belongs to, if any."""

    def headers(self) -> dict[str, str]:
        """The correlation headers by which the server files the call."""
        headers = {HEADER_CALL: self.call_id, HEADER_NODE: quote(self.node, safe="")}
        if self.recorder is not None:
            headers[HEADER_RUN] = self.recorder.run.run_id
            if self.recorder.run.group_id is not None:
                headers[HEADER_GROUP] = self.recorder.run.group_id
        return headers


def current_call() -> CallScope:
    """The call being made in this context; outside a recording a new one, with the node if LangGraph tells it."""
    scope = _call.get()
    if scope is not None and (scope.recorder is None or scope.recorder.has(scope.call_id)):
        return scope
    config = var_child_runnable_config.get() or {}
    return CallScope(str(uuid.uuid4()), node_path(config.get("metadata") or {}), None)


@contextmanager
def calling(run_manager: BaseRunManager | None) -> Iterator[None]:
    """Make this run manager's call the current one, where LangChain passes a run manager."""
    if run_manager is None:
        yield
        return
    call_id = str(run_manager.run_id)
    recorders = (handler for handler in run_manager.handlers if isinstance(handler, Recorder))
    recorder = next((recorder for recorder in recorders if recorder.has(call_id)), None)
    before = _call.get()
    _call.set(CallScope(call_id, node_path(run_manager.metadata), recorder))
    try:
        yield
    finally:
        _call.set(before)


def node_path(metadata: Mapping[str, Any]) -> str:
    """Node path of a LangGraph checkpoint namespace: ``planner:<task>|1|model:<task>`` is ``planner|model``."""
    parts = str(metadata.get("langgraph_checkpoint_ns") or "").split("|")
    return "|".join(part.split(":")[0] for part in parts if not part.isdigit())


def _version(model: object) -> str | None:
    return model if isinstance(model, str) and _VERSION.fullmatch(model) else None


def _now() -> datetime:
    return datetime.now(UTC)


_current: ContextVar[Recorder | None] = ContextVar("langgraph_art_recorder", default=None)
_call: ContextVar[CallScope | None] = ContextVar("langgraph_art_call", default=None)
register_configure_hook(_current, inheritable=True)
