"""The handler that LangChain attaches to everything inside a recording, and which call is being made just now.

Invariant: a call belongs to exactly one run, that of the innermost open recording. A recording ends with its block:
what comes later is not in it, and what is still in flight then is kept as not delivered.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote
from uuid import UUID

from langchain_core.callbacks.manager import BaseRunManager
from langchain_core.messages import BaseMessage
from langgraph.errors import GraphInterrupt
from langgraph.types import Command

from langgraph_art import failures
from langgraph_art.node_calls import CallHandler, namespace_here, namespace_of, node_path, now
from langgraph_art.protocol import HEADER_CALL, HEADER_GROUP, HEADER_NODE, HEADER_RUN
from langgraph_art.runs import GraphRun, NodeCall, RunInterrupt
from langgraph_art.unattributed import UNATTRIBUTED, current


class Recorder(CallHandler):
    """Turns the callbacks of one recording into its `GraphRun`. Made by `record`.

    Args:
        run: what is filled; one that was recorded before goes on.
        sampling: parameters that `ChatART` puts over the app's.
        outer: the recording around this one.
    """

    def __init__(self, run: GraphRun, sampling: dict[str, Any], *, outer: Recorder | None) -> None:
        super().__init__()
        self.run = run
        self.sampling = sampling
        self.outer = outer
        self._closed = False
        self._open: dict[UUID, str] = {}  # chain runs in progress -> namespace
        self._attempts = {call.namespace: call.attempt for call in run.calls}  # of nodes that made calls
        self._roots: set[UUID] = set()  # graph invocations in progress
        self._roots_are_graphs = run.input is not None or bool(run.calls)  # of a run that goes on, the first was there
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
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        """A graph, a node or a step inside one begins."""
        metadata = metadata or {}
        if not self._owns():
            return
        with self._lock:
            if self._closed:
                return
            node = metadata.get("langgraph_node")
            namespace = namespace_of(metadata)
            parent = "" if parent_run_id is None else self._open.get(parent_run_id, "")
            if node is not None and name == node and parent != namespace and namespace in self._attempts:
                self._attempts[namespace] += 1
            is_graph = node is None and metadata.get("ls_integration") == "langgraph"
            is_top = parent_run_id not in self._open
            self._open[run_id] = namespace
            if is_graph:
                self._graph_starts(inputs, metadata)
            elif not self._roots_are_graphs and is_top and self.run.input is None:
                self.run.input = inputs
            if is_graph or (is_top and not self._roots_are_graphs):
                self._roots.add(run_id)

    def _graph_starts(self, inputs: Any, metadata: Mapping[str, Any]) -> None:
        if not self._roots_are_graphs:  # until now there were only the chains around this graph
            self._roots_are_graphs = True
            self._roots = set()
            self.run.input, self.run.output = inputs, None
            self.run.thread_id, self.run.forked_at = metadata.get("thread_id"), metadata.get("checkpoint_id")
        if isinstance(inputs, Command) and inputs.resume is not None:
            self._resumes(inputs.resume)

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
            node = node_path(self._open.pop(run_id, ""))
            if self._closed:
                return
            if isinstance(error, GraphInterrupt):
                self._interrupted(error, node)
            elif node:
                self._raised.setdefault(id(error), (error, node))
            if run_id in self._roots:
                self._roots.discard(run_id)
                self.run.output = None

    def _interrupted(self, error: GraphInterrupt, node: str) -> None:
        # It is raised through every graph around the node, and again if the graph goes on without an answer.
        pending = {interrupt.id for interrupt in self.run.interrupts if not interrupt.answered}
        for interrupt in error.args[0] if error.args else ():
            if interrupt.id not in pending:
                self.run.interrupts.append(
                    RunInterrupt.model_construct(id=interrupt.id, node=node, value=interrupt.value, at=now())
                )

    def _resumes(self, resume: Any) -> None:
        """Note the answers: by interrupt id, or, as LangGraph takes it, one for the only interrupt there is."""
        pending = [interrupt for interrupt in self.run.interrupts if not interrupt.answered]
        by_id = isinstance(resume, dict) and any(interrupt.id in resume for interrupt in pending)
        for interrupt in pending:
            if by_id and interrupt.id in resume:
                interrupt.answered, interrupt.answer = True, resume[interrupt.id]
            elif not by_id and len(pending) == 1:
                interrupt.answered, interrupt.answer = True, resume

    # -- calls --------------------------------------------------------------------------------------------------------

    def _owns(self) -> bool:
        """Whether what starts now, in this context, belongs to this recording and not to one inside it."""
        inner = current.get()
        return not self._closed and (not isinstance(inner, Recorder) or inner is self or inner._closed)

    def _takes(self, call_id: str) -> bool:
        return self._owns()

    def _add(self, call: NodeCall) -> None:
        with self._lock:
            if self._closed:
                return
            call.attempt = self._attempts.setdefault(call.namespace, 1)
            self.run.calls.append(call)
            self._in_flight[call.call_id] = call
        if self.outer is not None:
            self.outer.release(call.call_id)
        UNATTRIBUTED.release(call.call_id)
        _call.set(CallScope(call.call_id, call.node, self))

    def _ended(self, call: NodeCall, error: BaseException | None) -> None:
        if error is not None and call.node:
            self._raised.setdefault(id(error), (error, call.node))

    def _as_dict(self, message: BaseMessage) -> dict[str, Any]:
        """The message as a dict, the same one as long as it is unchanged: a history is dumped and kept only once."""
        with self._lock:
            known = self._dicts.get(id(message))
            if known is not None and known[1] == message.__dict__:
                return known[1]
            data = message.model_dump()
            self._dicts[id(message)] = (message, data)
            return data

    # -- for `record` and `ChatART` -----------------------------------------------------------------------------------

    def recorder_of(self, call_id: str) -> Recorder | None:
        """This recorder, if it has the call."""
        return self if self.has(call_id) else None

    def sent(self, call_id: str) -> None:
        """Note that `ChatART` makes this call."""
        with self._lock:
            if call_id in self._in_flight:
                call = self._in_flight[call_id]
                call.art, call.tools = True, None

    def release(self, call_id: str) -> None:
        """Give a call up to a recording inside this one. Both see it where a thread has no context of its own."""
        with self._lock:
            call = self._in_flight.pop(call_id, None)
            if call is not None:
                self.run.calls.remove(call)
        if self.outer is not None:
            self.outer.release(call_id)

    def open(self) -> None:
        """Begin the recording, in this context."""
        current.set(self)
        UNATTRIBUTED.open.add(self)

    def fail(self, error: BaseException) -> None:
        """Note the exception that leaves the block."""
        with self._lock:
            nodes = (self._raised[id(link)][1] for link in failures.causes(error) if id(link) in self._raised)
            self.run.error = failures.describe(error, next(nodes, None))
            self.run.output = None

    def close(self) -> None:
        """End the recording; calls in flight stay, as not delivered."""
        # Set, not reset by token: a block inside an async generator may end in another context than it began in.
        current.set(self.outer)
        UNATTRIBUTED.open.discard(self)
        with self._lock:
            self._closed = True
            self.run.ended_at = now()
            for call in self._in_flight.values():
                call.ended_at = self.run.ended_at
            self._in_flight.clear()
            self._open.clear()
            self._raised.clear()
            self._dicts.clear()


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
    return CallScope(str(uuid.uuid4()), node_path(namespace_here(None)), None)


@contextmanager
def calling(run_manager: BaseRunManager | None) -> Iterator[None]:
    """Make this run manager's call the current one, where LangChain passes a run manager."""
    if run_manager is None:
        yield
        return
    call_id = str(run_manager.run_id)
    finders = (getattr(handler, "recorder_of", None) for handler in run_manager.handlers)
    recorder = next((found for find in finders if find is not None and (found := find(call_id))), None)
    before = _call.get()
    _call.set(CallScope(call_id, node_path(namespace_here(run_manager.metadata)), recorder))
    try:
        yield
    finally:
        _call.set(before)


_call: ContextVar[CallScope | None] = ContextVar("langgraph_art_call", default=None)
