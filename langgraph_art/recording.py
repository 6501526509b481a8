"""Recording: one `GraphRun` of everything that happens inside a ``with record()`` block.

Invariant: what is not recorded right is refused before the block begins; inside it the app runs as it would without.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from langchain_core.tracers.context import register_configure_hook

from langgraph_art.instrument import record_as_environment_says
from langgraph_art.recorder import Recorder
from langgraph_art.remote import telling_remote_graphs
from langgraph_art.runs import GraphRun
from langgraph_art.unattributed import UNATTRIBUTED, current, noting_lines

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:~-]{0,127}")

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
    resume: GraphRun | None = None,
    parent: GraphRun | str | None = None,
) -> Iterator[GraphRun]:
    """Record everything that LangGraph and LangChain do inside the block as one graph run.

    Works in sync and async code, for any graph, compiled before or inside. Several invocations in one block, such as
    an interrupt and its resume, are one run: the first one's input, the last one's output. Recordings may run
    concurrently and may be nested; the innermost owns a call. The block's context must reach the graph: where you hand
    the graph, or a call inside a node, to a plain thread pool, submit ``contextvars.copy_context().run`` or use
    LangChain's ``ContextThreadPoolExecutor``. What cannot be attributed is reported: see `unattributed_calls`.

    Args:
        run_id: id of the run, at most 128 letters, digits and ``._:~-``; a new UUID by default.
        group_id: id of the group of runs of the same input, with the same alphabet.
        metadata: kept with the run as it is.
        sampling: sampling parameters for the calls that `ChatART` makes in this recording, over the app's own
            settings, such as ``{"temperature": 1.0, "top_p": 1.0}``; ``None`` as a value removes the app's setting.
            By default the app's settings are untouched.
        resume: a run recorded before that goes on, such as one that waited at an interrupt, in this process or loaded
            from a file. Its calls stay, new ones are added, and the policies' versions stay those it is pinned to. It
            keeps its ids; ``error``, ``output`` and a reward it had are those of the whole run again.
        parent: the run, or its id, from whose checkpoint this one goes another way (time travel). The calls before
            the fork belong to the parent only.

    Yields:
        The run; with ``resume`` that same object. Calls appear while they are made; it is complete when the block
        ends. If an exception leaves the block, ``error`` is set, the calls so far are kept, and the exception goes on.

    Raises:
        ValueError: an id has other characters, a sampling parameter is unknown, or ``resume`` is a run that is being
            recorded now or stands beside an id of its own.
    """
    for name, value in (("run_id", run_id), ("group_id", group_id)):
        if value is not None and not _ID.fullmatch(value):
            raise ValueError(f"record({name}={value!r}): use at most 128 letters, digits and any of ._:~-")
    if unknown := sorted(set(sampling or ()) - SAMPLING_PARAMETERS - ENGINE_SAMPLING_PARAMETERS):
        known = ", ".join(sorted(SAMPLING_PARAMETERS | ENGINE_SAMPLING_PARAMETERS))
        raise ValueError(f"record(sampling=...): unknown parameter {', '.join(unknown)}. Known are: {known}")
    outer = current.get()
    parent_run = parent.run_id if isinstance(parent, GraphRun) else parent
    if resume is None:
        run = GraphRun(run_id=run_id or str(uuid.uuid4()), group_id=group_id, parent_run=parent_run)
    else:
        _check_resume(resume, {"run_id": run_id, "group_id": group_id, "parent": parent})
        run = resume
    recorder = Recorder(run, dict(sampling or {}), outer=outer if isinstance(outer, Recorder) else None)
    run.metadata.update(metadata or {})
    run.ended_at = run.error = run.reward = run.reward_error = None
    run.reward_parts, run.node_rewards, run.reward_info = {}, {}, {}
    recorder.open()
    try:
        with telling_remote_graphs, noting_lines:
            yield run
    except BaseException as error:
        recorder.fail(error)
        raise
    finally:
        recorder.close()


def _check_resume(run: GraphRun, identity: Mapping[str, object]) -> None:
    if given := [name for name, value in identity.items() if value is not None]:
        raise ValueError(f"record(resume=..., {given[0]}=...): a run that goes on keeps its own; leave {given[0]} out")
    if any(recorder.run.run_id == run.run_id for recorder in list(UNATTRIBUTED.open)):
        raise ValueError(f"record(resume=...): run {run.run_id} is being recorded now; end that recording first")


# After that of `record_all`, which is imported above: it has its calls before the handler for lost ones looks at them.
register_configure_hook(current, inheritable=True)
record_as_environment_says()
