"""Graphs behind a `RemoteGraph`: their calls belong to the run that asked for them.

Invariant: while a recording is open, each request of a `RemoteGraph` in its context says which run, group and node it
comes from and how to sample, as one entry of the config's metadata. `record_all` in the remote process records its part
under the same run id, so the server has all calls as one run's; `join_remote` puts the two parts together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any

from langchain_core.runnables.config import ensure_config
from langgraph.pregel.remote import RemoteGraph
from pydantic import BaseModel, Field, ValidationError

from langgraph_art.node_calls import namespace_of, node_path
from langgraph_art.patching import Patch
from langgraph_art.recorder import Recorder
from langgraph_art.runs import GraphRun
from langgraph_art.unattributed import UNATTRIBUTED, current

KEY = "langgraph_art"
"""The entry of the config's metadata."""
CALLED_FROM = "called_from"
"""The entry of a remote part's ``GraphRun.metadata``: the namespace of the node that asked."""
_ID = r"^[A-Za-z0-9][A-Za-z0-9._:~-]{0,127}$"


class Caller(BaseModel):
    """Who asks a remote graph."""

    run: str = Field(pattern=_ID)
    group: str | None = Field(default=None, pattern=_ID)
    namespace: str
    """LangGraph's namespace of the node that asks, such as ``research:<task>``."""
    sampling: dict[str, Any]
    """As of `record`."""


def caller_of(metadata: Mapping[str, Any]) -> Caller | None:
    """Who asked for a graph that begins with these metadata, if it was asked from afar within a recording."""
    try:
        return Caller.model_validate_json(metadata[KEY]) if KEY in metadata else None
    except ValidationError:  # of somebody else
        return None


def join_remote(runs: Iterable[GraphRun], remote: Iterable[GraphRun]) -> int:
    """Put the calls that remote graphs made into the runs that asked for them.

    A call gets the path of the node that asked in front of its own: ``research|model``. Calls that a run has already
    are left out, so joining twice does no harm.

    Args:
        runs: recorded here; changed in place.
        remote: recorded by `record_all` in the remote process, such as ``load_runs`` of its file.

    Returns:
        The number of calls that were added.
    """
    by_id = {run.run_id: run for run in runs}
    added = 0
    for part in remote:
        namespace = part.metadata.get(CALLED_FROM)
        run = by_id.get(part.run_id)
        if run is None or namespace is None:
            continue
        known = {call.call_id for call in run.calls}
        path = node_path(namespace)
        for call in part.calls:
            if call.call_id not in known:
                names = {"node": f"{path}|{call.node}", "namespace": f"{namespace}|{call.namespace}"}
                run.calls.append(call.model_copy(update=names if path else {}))
                added += 1
        run.calls.sort(key=lambda call: call.started_at)
    return added


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    """``stream`` and ``astream``, to which every other way of asking a `RemoteGraph` leads."""

    @functools.wraps(original)
    def stream(self: RemoteGraph, input: Any, config: Any = None, **kwargs: Any) -> Any:
        recorder = _recorder_here()
        if recorder is not None:
            metadata = ensure_config(config).get("metadata") or {}
            run, namespace = recorder.run, namespace_of(metadata)
            caller = Caller(run=run.run_id, group=run.group_id, namespace=namespace, sampling=recorder.sampling)
            config = {**(config or {}), "metadata": {**metadata, KEY: caller.model_dump_json()}}
        return original(self, input, config, **kwargs)

    return stream


def _recorder_here() -> Recorder | None:
    for found in (current.get(), inside.get()):
        if isinstance(found, Recorder) and found in UNATTRIBUTED.open:
            return found
    return None


inside: ContextVar[Recorder | None] = ContextVar("langgraph_art_inside", default=None)
"""The recording of `record_all` that this context is in."""
telling_remote_graphs = Patch(RemoteGraph, {"stream": _telling, "astream": _telling})
