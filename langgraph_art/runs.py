"""The data of recorded graph runs, and the file format that keeps them.

Invariant: a run that is saved and loaded again is equal to the first, for all JSON values and LangChain messages.
Token arrays are not part of a recording: the server has them, and `attach_tokens` fetches them on request.

File format, version 1: JSON Lines in UTF-8, one graph run a line. Each line is an object with ``format``
(``"langgraph-art.run"``), ``version`` (1) and the fields of `GraphRun`; values that JSON cannot hold are written as
`langgraph_art.plain` describes. ``pandas.read_json(path, lines=True)`` and polars open it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, Field, ValidationError

from langgraph_art.errors import RunFileError
from langgraph_art.plain import from_plain, to_plain
from langgraph_art.protocol import RecordedCall

FORMAT = "langgraph-art.run"
FORMAT_VERSION = 1


class RunError(BaseModel):
    """What ended a graph run, or a single call, before its time."""

    type: str
    """Qualified class name of the exception, such as ``openai.BadRequestError``."""
    message: str
    node: str | None
    """Path of the deepest LangGraph node in which it was raised; ``None`` if outside any node."""
    infrastructure: bool
    """True for what no policy can cause: transport errors, timeouts, 5xx, 429, refused credentials, cancellation.
    False for what a policy can cause: recursion limit, context overflow, parsing and tool errors."""


class NodeCall(BaseModel):
    """One LLM call inside a graph run, with the node it came from."""

    call_id: str
    """LangChain's run id of the call; the key under which the server recorded its tokens."""
    node: str
    """Node path, such as ``planner|model``; empty outside any node."""
    model: str
    """Name that was asked for."""
    version: str | None = None
    """Policy version that answered, such as ``researcher@12``; ``None`` for other models and without an answer."""
    messages: list[dict[str, Any]]
    """What the model was given: LangChain messages as dicts (``type``, ``content``, ``tool_calls``, ...). Calls of one
    run share the dicts of the messages that they have in common."""
    response: dict[str, Any] | None = None
    """The answer, in the same form; ``None`` if none came or it could not be parsed."""
    usage: dict[str, Any] | None = None
    """``input_tokens``, ``output_tokens``, ``total_tokens`` and details, as LangChain's ``usage_metadata``."""
    finish_reason: str | None = None
    started_at: datetime
    """UTC."""
    ended_at: datetime | None = None
    """UTC."""
    error: RunError | None = None
    delivered: bool = False
    """Whether the answer reached the graph, also if it then could not be parsed. Only such calls train."""
    art: bool = False
    """Whether `ChatART` made the call, so that the server has its tokens and it can be trained on."""
    tokens: RecordedCall | None = None
    """The exact tokens, filled by `attach_tokens` only."""


class GraphRun(BaseModel):
    """One execution of a graph for one task, start to finish, interrupts and resumes included."""

    run_id: str
    group_id: str | None = None
    """The group of runs of the same task input that it belongs to."""
    input: Any = None
    """Input of the first graph invocation: the real object while live, plain data and messages after loading."""
    output: Any = None
    """Final state of the last graph invocation, in the same form; ``None`` if it failed."""
    calls: list[NodeCall] = Field(default_factory=list)
    """In the order in which they started."""
    error: RunError | None = None
    started_at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    """UTC."""
    ended_at: datetime | None = None
    """UTC; ``None`` while it runs."""
    reward: float | None = None
    reward_parts: dict[str, float] = Field(default_factory=dict)
    """Named parts of the reward, if the reward callback returned any."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Whatever the caller of `record` wants to keep with the run."""

    @property
    def seconds(self) -> float:
        """Wall-clock seconds from start to end, or until now while it runs."""
        return ((self.ended_at or datetime.now(UTC)) - self.started_at).total_seconds()

    @property
    def nodes(self) -> list[str]:
        """Paths of the nodes that made calls, each once, in the order of their first call."""
        return list(dict.fromkeys(call.node for call in self.calls))

    def calls_at(self, node: str) -> list[NodeCall]:
        """The calls made in a node or below it, in the order in which they started.

        Args:
            node: a node's name (``model``), its full path (``planner|model``) or any stretch of that path
                (``planner`` gives the calls of all nodes in that subgraph).
        """
        wanted = node.split("|")
        return [call for call in self.calls if _holds(call.node.split("|"), wanted)]


class RunGroup(BaseModel):
    """Graph runs of the same task input; advantages are relative inside it."""

    group_id: str
    runs: list[GraphRun]

    @property
    def rewards(self) -> list[float | None]:
        """Reward of each run, in order; ``None`` for a run without one."""
        return [run.reward for run in self.runs]


def _holds(path: list[str], wanted: list[str]) -> bool:
    return any(path[start : start + len(wanted)] == wanted for start in range(len(path) - len(wanted) + 1))


# -- files ------------------------------------------------------------------------------------------------------------


def save_runs(path: str | os.PathLike[str], runs: Iterable[GraphRun], *, append: bool = False) -> None:
    """Write graph runs to a JSON Lines file.

    Args:
        path: the file. Its folder must exist. An existing file is replaced in one step, so that a crash leaves
            either the old or the new one.
        runs: the runs. JSON values and LangChain messages in ``input``, ``output`` and ``metadata`` are kept exactly;
            other objects become plain data with the name of their type.
        append: add to the end of an existing file instead.
    """
    target = Path(path)
    lines = (_line(run) for run in runs)
    if append:
        with target.open("ab") as file:
            file.writelines(lines)
        return
    draft = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        with draft.open("wb") as file:
            file.writelines(lines)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def load_runs(path: str | os.PathLike[str]) -> list[GraphRun]:
    """Read graph runs from a file that `save_runs` wrote.

    Raises:
        RunFileError: a line is broken (the message names it), or the file is of a newer version.
    """
    source = Path(path)
    with source.open("rb") as file:
        return [_run(line, f"{source}, line {number}") for number, line in enumerate(file, 1) if line.strip()]


def _line(run: GraphRun) -> bytes:
    header = {"format": FORMAT, "version": FORMAT_VERSION}
    fields = {name: to_plain(value) for name, value in _fields(run).items()}
    data = {**header, **fields}
    try:
        return json.dumps(data, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate, which UTF-8 cannot hold but a JSON escape can
        return json.dumps(data, allow_nan=False).encode() + b"\n"


def _fields(run: GraphRun) -> dict[str, Any]:
    """The run as a dict in which only ``input``, ``output``, ``metadata`` and messages are not JSON yet."""
    free = {"input": run.input, "output": run.output, "metadata": run.metadata}
    calls = [
        {**call.model_dump(mode="json", exclude={"messages", "response"}), "messages": call.messages}
        | {"response": call.response}
        for call in run.calls
    ]
    return {**run.model_dump(mode="json", exclude={*free, "calls"}), **free, "calls": calls}


def _run(line: bytes, where: str) -> GraphRun:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise RunFileError(f"{where}: not valid JSON ({error}). Remove the line to load the others.") from error
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise RunFileError(f'{where}: not a graph run (no "format": "{FORMAT}"). Was it written by save_runs?')
    version = data.pop("version", None)
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise RunFileError(
            f"{where}: format version {version}, but this langgraph-art reads up to {FORMAT_VERSION}. "
            "Upgrade langgraph-art to load it."
        )
    try:
        return GraphRun.model_validate(from_plain(data))
    except (ValidationError, ValueError, KeyError, TypeError) as error:
        raise RunFileError(f"{where}: {error}. Remove the line to load the others.") from error


# -- tokens -----------------------------------------------------------------------------------------------------------


class CallSource(Protocol):
    """Whatever can fetch the recorded calls of a run; `langgraph_art.Client` does."""

    def calls(self, run_id: str) -> Sequence[RecordedCall]:
        """All calls that the server recorded for the run."""
        ...


def attach_tokens(runs: Iterable[GraphRun], client: CallSource) -> None:
    """Fill ``tokens`` of each node call with what the server recorded: ids, logprobs, version, sampling.

    Of several attempts of one call (the SDK retries lost answers), the last complete one is taken, and of several
    answers to one call (``n > 1``) the first, which is the one the graph got. Calls that the server does not have,
    such as those of other models, keep ``None``.

    Args:
        runs: finished runs; changed in place.
        client: the server's client.
    """
    for run in runs:
        recorded = sorted(client.calls(run.run_id), key=lambda call: call.attempt)
        complete = {call.call_id: call for call in recorded if call.status == "complete" and call.choice == 0}
        for call in run.calls:
            call.tokens = complete.get(call.call_id, call.tokens)
