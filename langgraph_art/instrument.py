"""Recording every graph run of a process, without a block around it: in scripts, services and LangGraph's own server.

Invariant: each graph invocation that is not part of another one, nor inside a `record` block, becomes one `GraphRun`;
a resumed one goes on in the run that waited. The app is neither slowed down nor failed by what becomes of its runs:
they are handed on in a thread of their own.

What belongs to which run is told by LangChain's run tree, not by the context, so graphs that take turns in one context
(two generators) stay apart.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, cast
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.tracers.context import register_configure_hook
from langgraph.types import Command

from langgraph_art.recorder import Recorder
from langgraph_art.remote import CALLED_FROM, Caller, caller_of, inside, telling_remote_graphs
from langgraph_art.runs import GraphRun, save_runs
from langgraph_art.unattributed import UNATTRIBUTED, current

log = logging.getLogger(__name__)

VARIABLE = "LANGGRAPH_ART_RECORD"
"""Environment variable: the file to which every graph run of the process is appended."""
_PATIENCE = 30.0  # seconds for the sink at the end
_WAITING = 1000  # runs at an interrupt that are kept in memory


def record_all(
    sink: str | os.PathLike[str] | Callable[[GraphRun], object], *, metadata: Mapping[str, Any] | None = None
) -> Callable[[], None]:
    """Record every graph run of this process from now on, in all threads and event loops.

    Call it once at start-up; no graph, and no code that calls one, need change. ``LANGGRAPH_ART_RECORD=runs.jsonl`` in
    the environment does the same as soon as `ChatART` or anything that records is imported, and ``langgraph-art
    record`` for programs that import nothing of this package. A run inside a `record` block belongs to that block
    alone. A run that waits at an interrupt is handed on as it is, and once more, whole, when it was resumed in this
    process: the last with a run id counts.

    Args:
        sink: a file, to which each run is appended as `save_runs` writes it; or a function that gets each run when it
            has ended. It is called in a thread of its own; what it raises is logged.
        metadata: kept with every run.

    Returns:
        A function that ends the recording and waits until the sink has got all runs, half a minute at most. It is
        called by itself when the process exits.

    Raises:
        OSError: the file cannot be written.
        RuntimeError: the process records all its runs already.
    """
    global _handler
    with _starting:
        if _handler is not None:
            raise RuntimeError("record_all: this process records all its runs already; call what it returned first")
        deliver = sink if callable(sink) else partial(_append, sink)
        if not callable(sink):
            save_runs(sink, [], append=True)  # a file that cannot be written fails now, not at each run
        handler = _handler = AllRuns(deliver, dict(metadata or {}))
    atexit.register(handler.stop)
    return handler.stop


def record_as_environment_says() -> None:
    """Begin if ``LANGGRAPH_ART_RECORD`` is set."""
    if (path := os.environ.get(VARIABLE)) and _handler is None:
        record_all(path)


class AllRuns(BaseCallbackHandler):
    """Finds graph runs in everything that LangChain reports, and gives each a `Recorder`. Made by `record_all`."""

    run_inline = True  # as `Recorder`: `ChatART` must know which call it is making

    def __init__(self, deliver: Callable[[GraphRun], object], metadata: dict[str, Any]) -> None:
        self._metadata = metadata
        self._lock = threading.Lock()
        self._open: dict[UUID, Recorder] = {}  # chains and tools in progress
        self._roots: dict[UUID, Recorder] = {}
        self._calls: dict[str, Recorder] = {}
        self._waiting: OrderedDict[str, GraphRun] = OrderedDict()  # at an interrupt, by thread
        telling_remote_graphs.__enter__()
        self._ended: queue.SimpleQueue[GraphRun | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._hand_on, args=(deliver,), name="langgraph-art-runs", daemon=True)
        self._writer.start()

    def recorder_of(self, call_id: str) -> Recorder | None:
        """The recording that has this call."""
        return self._calls.get(call_id)

    def stop(self) -> None:
        """End it; runs in progress are handed on as they are."""
        global _handler
        if _handler is self:
            _handler = None
        atexit.unregister(self.stop)
        for run_id in list(self._roots):
            self._end(run_id)
        if self._writer.is_alive():
            telling_remote_graphs.__exit__()
            self._ended.put(None)
            self._writer.join(_PATIENCE)
            if self._writer.is_alive():
                log.error("record_all: the sink is busy; up to %d graph runs are lost", self._ended.qsize())

    def _hand_on(self, deliver: Callable[[GraphRun], object]) -> None:
        while (run := self._ended.get()) is not None:
            try:
                deliver(run)
            except Exception:
                log.exception("graph run %s could not be handed on, it is lost", run.run_id)

    # -- the run tree -------------------------------------------------------------------------------------------------

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
        recorder = self._join(run_id, parent_run_id)
        if recorder is None and _is_graph(parent_run_id, metadata) and not _in_a_block():
            caller = caller_of(metadata)
            # Behind a RemoteGraph they come with the caller's node.
            metadata = {key: value for key, value in metadata.items() if not key.startswith("langgraph_")}
            recorder = self._begin(run_id, inputs, metadata.get("thread_id"), caller)
        if recorder is not None:
            inside.set(recorder)
            recorder.on_chain_start(
                serialized, inputs, run_id=run_id, parent_run_id=parent_run_id, metadata=metadata, **kwargs
            )

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """It ends."""
        if (recorder := self._leave(run_id)) is not None:
            recorder.on_chain_end(outputs, run_id=run_id, **kwargs)
            self._end(run_id)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """It fails."""
        if (recorder := self._leave(run_id)) is not None:
            recorder.on_chain_error(error, run_id=run_id, **kwargs)
            if run_id in self._roots:
                recorder.fail(error)
            self._end(run_id)

    def on_tool_start(
        self, serialized: Any, input_str: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """A tool begins, which may call models."""
        self._join(run_id, parent_run_id)

    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """It ends."""
        self._leave(run_id)

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """It fails."""
        self._leave(run_id)

    def on_chat_model_start(
        self, serialized: Any, messages: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """A chat model is called."""
        if (recorder := self._of_call(run_id, parent_run_id)) is not None:
            recorder.on_chat_model_start(serialized, messages, run_id=run_id, **kwargs)

    def on_llm_start(
        self, serialized: Any, prompts: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """A plain LLM is called."""
        if (recorder := self._of_call(run_id, parent_run_id)) is not None:
            recorder.on_llm_start(serialized, prompts, run_id=run_id, **kwargs)

    def on_llm_end(self, response: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """The answer has reached the graph."""
        if (recorder := self._calls.pop(str(run_id), None)) is not None:
            recorder.on_llm_end(response, run_id=run_id, **kwargs)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """The call failed."""
        if (recorder := self._calls.pop(str(run_id), None)) is not None:
            recorder.on_llm_error(error, run_id=run_id, **kwargs)

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _begin(self, root: UUID, inputs: Any, thread: str | None, caller: Caller | None) -> Recorder:
        resumed = isinstance(inputs, Command) and inputs.resume is not None
        with self._lock:
            run = self._waiting.pop(str(thread), None)
            if run is None or not resumed:
                run = GraphRun(run_id=str(uuid.uuid4()), metadata={**self._metadata})
                if caller is not None:
                    run.run_id, run.group_id = caller.run, caller.group
                    run.metadata[CALLED_FROM] = caller.namespace
            run.ended_at = run.error = None
            recorder = Recorder(run, {} if caller is None else caller.sampling, outer=None)
            self._roots[root] = self._open[root] = recorder
        UNATTRIBUTED.open.add(recorder)
        return recorder

    def _end(self, run_id: UUID) -> None:
        """Close the recording if this was its graph."""
        with self._lock:
            recorder = self._roots.pop(run_id, None)
            if recorder is None:
                return
            self._open = {key: value for key, value in self._open.items() if value is not recorder}
            self._calls = {key: value for key, value in self._calls.items() if value is not recorder}
        context = current.get()
        recorder.close()
        current.set(context)
        run = recorder.run
        if run.thread_id is not None and any(not interrupt.answered for interrupt in run.interrupts):
            with self._lock:
                self._waiting[run.thread_id] = run
                while len(self._waiting) > _WAITING:
                    self._waiting.popitem(last=False)
            run = run.model_copy(update={"calls": list(run.calls)})  # the other goes on
        self._ended.put(run)

    def _join(self, run_id: UUID, parent: UUID | None) -> Recorder | None:
        with self._lock:
            recorder = self._open.get(parent) if parent is not None else None
            if recorder is not None:
                self._open[run_id] = recorder
            return recorder

    def _leave(self, run_id: UUID) -> Recorder | None:
        with self._lock:
            return self._open.pop(run_id, None)

    def _of_call(self, run_id: UUID, parent: UUID | None) -> Recorder | None:
        """The recording of a call; one that is given callbacks of its own has no parent, only its context."""
        if _in_a_block():
            return None
        with self._lock:
            recorder = self._open.get(parent) if parent is not None else inside.get()
            if recorder is None or recorder not in UNATTRIBUTED.open:
                return None
            self._calls[str(run_id)] = recorder
            return recorder


def _is_graph(parent: UUID | None, metadata: Mapping[str, Any]) -> bool:
    # Behind a RemoteGraph there is the caller's node, but no parent in this process.
    return metadata.get("ls_integration") == "langgraph" and (parent is None or "langgraph_node" not in metadata)


def _in_a_block() -> bool:
    block = current.get()
    return isinstance(block, Recorder) and block in UNATTRIBUTED.open


def _append(path: str | os.PathLike[str], run: GraphRun) -> None:
    save_runs(path, [run], append=True)


class _Everywhere:
    """What LangChain takes for a context variable, with one value in all contexts, which can be set and taken away."""

    def get(self) -> AllRuns | None:
        return _handler


_handler: AllRuns | None = None
_starting = threading.Lock()
register_configure_hook(cast("ContextVar[Any]", _Everywhere()), inheritable=True)
