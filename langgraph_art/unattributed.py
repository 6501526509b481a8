"""Calls that no recording can claim, because they are made in a context that knows none while recordings are open.

Invariant: such a call is kept, marked with the line of code that made it, and reported; it is never guessed into a
run. A context knows of recordings if one was ever opened in it, or in the context it was copied from; the threads of
a plain pool start with an empty one.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from types import FrameType
from typing import TYPE_CHECKING, Any

from langgraph_art.node_calls import CallHandler
from langgraph_art.patching import Patch
from langgraph_art.runs import NodeCall

if TYPE_CHECKING:
    from langgraph_art.recorder import Recorder

_KEPT = 1000
_PLUMBING = sys.stdlib_module_names | {"langgraph", "langgraph_art", "pydantic", "tenacity"}


class UnattributedCall(UserWarning):
    """A model call was made that belongs to no recording, while at least one was open. Shown once for each line."""


def unattributed_calls() -> list[NodeCall]:
    """The calls of this process that no recording could claim, oldest first; the last 1,000 are kept.

    Each has ``caller``, and ``node`` if LangGraph told it. They are in no run and are never trained. The server keeps
    the tokens of those that `ChatART` made, without a run.
    """
    with UNATTRIBUTED._lock:
        return list(UNATTRIBUTED.calls)


class Unattributed(CallHandler):
    """Keeps such calls; one for the process. LangChain attaches it wherever a context knows no recording."""

    def __init__(self) -> None:
        super().__init__()
        self.open: set[Recorder] = set()
        """The recordings in progress."""
        self.calls: deque[NodeCall] = deque(maxlen=_KEPT)
        # What the warnings module would keep for a module: where it was shown already.
        self._shown: dict[str | tuple[str, type[Warning], int], int] = {}

    def release(self, call_id: str) -> None:
        """Give a call up to a recording that knows it from a config, where the thread has no context of its own."""
        with self._lock:
            call = self._in_flight.pop(call_id, None)
            if call is not None:
                self.calls.remove(call)

    def _takes(self, call_id: str) -> bool:
        # A chain that began before a recording hands this handler on into it; there the context knows better. And
        # where it does not, a recorder in the config may have the call already.
        return current.get() is self and bool(self.open) and not any(r.has(call_id) for r in list(self.open))

    def _add(self, call: NodeCall) -> None:
        call.caller = caller()
        with self._lock:
            self._in_flight[call.call_id] = call
            self.calls.append(call)

    def _ended(self, call: NodeCall, error: BaseException | None) -> None:
        # Not when it began: then a recording might still claim it.
        name, _, line = (call.caller or f"thread {threading.current_thread().name}:0").rpartition(":")
        warnings.warn_explicit(
            f"a call of the model {call.model!r} belongs to no recording, although one is open: threads of a plain "
            "pool do not know the context they were started from. It is in unattributed_calls(), and is not trained. "
            "Use langchain_core.runnables.config.ContextThreadPoolExecutor or asyncio.to_thread, submit "
            "contextvars.copy_context().run, or pass the node's config on. If it is meant to stay outside, ignore "
            "this warning (langgraph_art.UnattributedCall).",
            UnattributedCall,
            name,
            int(line),
            registry=self._shown,
        )


def caller() -> str | None:
    """File and line of the application's code that makes a call.

    A pool that was given the model's own method has none in its thread. Then it is the line that handed the work to the
    pool; or, for pools that are not Python's executors, that at which another thread waits.
    """
    line = _line(sys._getframe())
    if line is None:
        me = threading.get_ident()
        others = (frame for thread, frame in sys._current_frames().items() if thread != me)
        waiting = (_application(frame) for frame in others if frame.f_globals.get("__name__") == "threading")
        # Worker threads of libraries wait all the time, for other things.
        own = (frame for frame in waiting if frame is not None and "site-packages" not in frame.f_code.co_filename)
        line = next((_at(frame) for frame in own), None)
    return line


def _line(frame: FrameType | None) -> str | None:
    """File and line of the innermost application's frame, or of the one that handed its thread this work."""
    found = _application(frame)
    if found is not None and found.f_code is _handed_over.__code__:
        line: str | None = found.f_locals["line"]
        return line
    return None if found is None else _at(found)


def _at(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _application(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is neither Python's own nor a framework's, or that of work handed to a thread."""
    while frame is not None:
        if frame.f_code is _handed_over.__code__:
            return frame
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in _PLUMBING and not package.startswith("langchain"):
            return frame
        frame = frame.f_back
    return None


def _handed_over(line: str | None, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Work in an executor's thread; its frame there knows the line that it comes from."""
    return function(*args, **kwargs)


def _with_line(submit: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(submit)
    def submit_with_line(self: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return submit(self, _handed_over, _line(sys._getframe(1)), function, *args, **kwargs)

    return submit_with_line


noting_lines = Patch(ThreadPoolExecutor, {"submit": _with_line})
"""While it is entered, work in an executor's thread knows the line that handed it over."""
UNATTRIBUTED = Unattributed()
current: ContextVar[CallHandler | None] = ContextVar("langgraph_art_recorder", default=UNATTRIBUTED)
"""What records in this context: a `Recorder`; ``None`` after its end; before any, the handler above."""
