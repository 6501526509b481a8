"""The data of recorded graph runs, and the file format that keeps them.

Invariant: a run that is saved and loaded again is equal to the first, for all JSON values and LangChain messages.
Token arrays are not part of a recording: the server has them, and `attach_tokens` fetches them on request.

File format, version 2: JSON Lines in UTF-8, one graph run a line. Each line is an object with ``format``
(``"langgraph-art.run"``), ``version`` (2) and the fields of `GraphRun`; values that JSON cannot hold are written as
`langgraph_art.plain` describes. ``messages`` and ``tools`` of the line hold each of the run's once, and calls refer to
them by position, so that a growing history does not make the file quadratic. Version 1, in which each call held its
messages itself, is still read. ``docs/recording.md`` describes each field.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, Field, ValidationError

from langgraph_art.errors import ArtError, RunFileError
from langgraph_art.plain import from_plain, to_plain
from langgraph_art.protocol import RecordedCall
from langgraph_art.redaction import redact, redacts

FORMAT = "langgraph-art.run"
FORMAT_VERSION = 2


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


class RunInterrupt(BaseModel):
    """A pause in which a node asked for something from outside, with LangGraph's ``interrupt(value)``."""

    id: str
    """LangGraph's id of the interrupt."""
    node: str
    """Path of the node that asked."""
    value: Any = None
    """What it asked with: the real object while live, plain data after loading."""
    at: datetime
    """UTC."""
    answered: bool = False
    """Whether the recording also holds the answer."""
    answer: Any = None
    """What ``Command(resume=...)`` brought, in the same form as ``value``."""


class NodeCall(BaseModel):
    """One LLM call inside a graph run, with the node it came from."""

    call_id: str
    """LangChain's run id of the call; the key under which the server recorded its tokens."""
    node: str
    """Node path, such as ``planner|model``; empty outside any node."""
    namespace: str = ""
    """LangGraph's checkpoint namespace, the path with task ids: ``planner:<id>|model:<id>``. Parallel branches of one
    node differ in it; retries of a node and its replay after an interrupt have the same."""
    attempt: int = 1
    """Which execution of the node made the call: above 1 in a node retry or in the replay after an interrupt."""
    model: str
    """Name that was asked for."""
    version: str | None = None
    """Policy version that answered, such as ``researcher@12``; ``None`` for other models and without an answer."""
    messages: list[dict[str, Any]]
    """What the model was given: LangChain messages as dicts (``type``, ``content``, ``tool_calls``, ...). Calls of one
    run share the dicts of the messages that they have in common."""
    tools: list[dict[str, Any]] | None = None
    """Tools that the model was offered, as its provider was told; ``None`` for calls of `ChatART`, whose tokens the
    server has."""
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
    """Whether `ChatART` made the call, so that the server has its tokens and it can be trained on. Calls of other
    models are good for tracing, judging and supervised fine-tuning; RL never trains on them."""
    caller: str | None = None
    """File and line that made the call, only where it could not be attributed: see `unattributed_calls`."""
    tokens: RecordedCall | None = None
    """The exact tokens, filled by `attach_tokens` only."""


class GraphRun(BaseModel):
    """One execution of a graph for one task, start to finish, interrupts and resumes included."""

    run_id: str
    group_id: str | None = None
    """The group of runs of the same task input that it belongs to."""
    parent_run: str | None = None
    """Id of the run from whose checkpoint this one goes another way; the calls before the fork are the parent's."""
    forked_at: str | None = None
    """Id of the checkpoint at which it began, if it did not begin at the start (time travel)."""
    thread_id: str | None = None
    """LangGraph's thread of the first graph invocation, if it has one."""
    input: Any = None
    """Input of the first graph invocation: the real object while live, plain data and messages after loading."""
    output: Any = None
    """Final state of the last graph invocation, in the same form; ``None`` if it failed."""
    calls: list[NodeCall] = Field(default_factory=list)
    """In the order in which they started."""
    interrupts: list[RunInterrupt] = Field(default_factory=list)
    """In the order in which they happened."""
    error: RunError | None = None
    started_at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    """UTC."""
    ended_at: datetime | None = None
    """UTC; ``None`` while it runs."""
    reward: float | None = None
    reward_parts: dict[str, float] = Field(default_factory=dict)
    """Named parts of the reward, if the reward callback returned any."""
    node_rewards: dict[str, float] = Field(default_factory=dict)
    """Mean reward of the run at each node path, beside ``reward``, if the reward callback gave any."""
    reward_info: dict[str, Any] = Field(default_factory=dict)
    """What explains the reward, such as a judge's reasons and usage; whatever the reward callback gave as
    ``Score(info=...)``."""
    reward_error: str | None = None
    """Why the run has no reward although it could have had one: what the reward callback raised or returned. Such a
    run is left out of its group and counted."""
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
    """Write graph runs to a JSON Lines file. What `set_redaction` was given is applied; the runs stay as they are.

    Args:
        path: the file. Its folder must exist. An existing file is replaced in one step, so that a crash leaves
            either the old or the new one.
        runs: the runs. JSON values and LangChain messages in ``input``, ``output``, ``metadata`` and interrupts are
            kept exactly; other objects become plain data with the name of their type.
        append: add to the end of an existing file instead.

    Raises:
        ArtError: a run carries tokens although a redaction function is set, or that function returned something that
            cannot be written. An existing file is as before.
    """
    target = Path(path)
    if append:
        lines = b"".join(_line(run) for run in runs)  # made before the file is touched: a run may be refused
        with target.open("ab") as file:
            file.write(lines)
    else:
        _replace(target, (_line(run) for run in runs))


def load_runs(path: str | os.PathLike[str]) -> list[GraphRun]:
    """Read graph runs from a file that `save_runs` wrote, of this or an older format version.

    Raises:
        RunFileError: a line is broken (the message names it), or the file is of a newer version.
    """
    return [_run(record, where) for record, where, _ in _records(Path(path))]


def remove_run(path: str | os.PathLike[str], run_id: str) -> int:
    """Take a run out of a file, which is replaced in one step; other lines stay as they are, byte for byte.

    Returns:
        How many lines were removed; with 0 the file was not touched.

    Raises:
        RunFileError: a line is broken, so that nobody can say whose it is.
    """
    records = list(_records(Path(path)))
    kept = [line for record, _, line in records if record.get("run_id") != run_id]
    if len(kept) < len(records):
        _replace(Path(path), kept)
    return len(records) - len(kept)


def as_record(run: GraphRun) -> dict[str, Any]:
    """The run as one line of a file holds it: JSON data, as ``docs/recording.md`` describes it, redacted."""
    messages, tools = _Once("a message", run), _Once("a tool", run)
    calls = [
        {
            **_plain_fields(call, {"messages", "response", "tools"}, run),
            "messages": [messages.place(message) for message in call.messages],
            "response": None if call.response is None else messages.place(call.response),
            "tools": None if call.tools is None else [tools.place(tool) for tool in call.tools],
        }
        for call in run.calls
    ]
    if redacts() and any(call.tokens is not None for call in run.calls):
        raise ArtError(
            f"Run {run.run_id} carries tokens, which spell the text that the redaction function hides. Set tokens of "
            "its calls to None before you save it."
        )
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        **_plain_fields(
            run, {"input", "output", "metadata", "reward_info", "reward_error", "interrupts", "calls"}, run
        ),
        "input": redact(to_plain(run.input)),
        "output": redact(to_plain(run.output)),
        "metadata": _redacted(to_plain(run.metadata), "the metadata", run),
        "reward_info": _redacted(to_plain(run.reward_info), "the reward's info", run),
        "reward_error": None if run.reward_error is None else _redacted(run.reward_error, "a reward's error", run),
        "interrupts": [
            _plain_fields(interrupt, {"value", "answer"}, run)
            | {"value": redact(to_plain(interrupt.value)), "answer": redact(to_plain(interrupt.answer))}
            for interrupt in run.interrupts
        ],
        "messages": messages.items,
        "tools": tools.items,
        "calls": calls,
    }


class _Once:
    """What the calls of a run share, each once, redacted."""

    def __init__(self, what: str, run: GraphRun) -> None:
        self.items: list[Any] = []
        self._what, self._run = what, run
        self._known: dict[int, int] = {}  # id of a dict -> its position; calls share the dicts of what they share
        self._same: dict[str, int] = {}  # its content -> its position

    def place(self, item: dict[str, Any]) -> int:
        """Position of this item in the list."""
        position = self._known.get(id(item))
        if position is None:
            data = to_plain(item)
            position = self._known[id(item)] = self._same.setdefault(json.dumps(data), len(self.items))
            if position == len(self.items):
                self.items.append(_redacted(data, self._what, self._run))
        return position


def _plain_fields(model: BaseModel, free: set[str], run: GraphRun) -> dict[str, Any]:
    """All fields but the free ones, as JSON data; the text of an error may quote anything, so it is redacted."""
    # Not pydantic's own JSON mode, which loses lone surrogates; an error may quote one.
    data = json.loads(json.dumps(model.model_dump(exclude=free), default=_as_text))
    fields = {name: to_plain(value) for name, value in data.items()}
    if fields.get("error") is not None:
        fields["error"]["message"] = _redacted(fields["error"]["message"], "an error", run)
    return fields


def _as_text(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _redacted(data: Any, what: str, run: GraphRun) -> Any:
    """The data after redaction, which must leave them of their kind or the file could not be read."""
    hidden = redact(data)
    if type(hidden) is not type(data):
        raise ArtError(
            f"The redaction function returned {type(hidden).__name__} for {what} of run {run.run_id}, where it was "
            f"given {type(data).__name__}. Return the same kind, such as an empty one."
        )
    return hidden


def _line(run: GraphRun) -> bytes:
    record = as_record(run)
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate, which UTF-8 cannot hold but a JSON escape can
        return json.dumps(record, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:  # everything else went through to_plain
        raise ArtError(f"The redaction function returned something that JSON cannot hold: {error}") from error


def _replace(target: Path, lines: Iterable[bytes]) -> None:
    draft = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        with draft.open("wb") as file:
            file.writelines(lines)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def _records(source: Path) -> Iterator[tuple[dict[str, Any], str, bytes]]:
    """Each line as JSON data, where it is, and as it is."""
    with source.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{source}, line {number}"
                yield _record(line, where), where, line


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise RunFileError(f"{where}: not valid JSON ({error}). Remove the line to load the others.") from error
    if not isinstance(record, dict) or record.pop("format", None) != FORMAT:
        raise RunFileError(f'{where}: not a graph run (no "format": "{FORMAT}"). Was it written by save_runs?')
    return record


def _run(record: dict[str, Any], where: str) -> GraphRun:
    version = record.pop("version", None)
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise RunFileError(
            f"{where}: format version {version}, but this langgraph-art reads up to {FORMAT_VERSION}. "
            "Upgrade langgraph-art to load it."
        )
    try:
        data = from_plain(record)
        if version == 1:
            return GraphRun.model_validate(data)
        messages, tools = data.pop("messages"), data.pop("tools")
        shared = [(call.pop("messages"), call.pop("response"), call.pop("tools")) for call in data["calls"]]
        run = GraphRun.model_validate(data | {"calls": [{**call, "messages": []} for call in data["calls"]]})
        # Set after validation, which would copy every message for every call.
        for call, (prompt, response, offered) in zip(run.calls, shared, strict=True):
            call.messages = [_item(messages, position) for position in prompt]
            call.response = None if response is None else _item(messages, response)
            call.tools = None if offered is None else [_item(tools, position) for position in offered]
        return run
    except (ValidationError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFileError(f"{where}: {error}. Remove the line to load the others.") from error


def _item(items: Any, position: Any) -> dict[str, Any]:
    if not isinstance(position, int) or not 0 <= position < len(items) or not isinstance(items[position], dict):
        raise ValueError(f"a call refers to item {position!r} of a list of {len(items)}")
    item: dict[str, Any] = items[position]
    return item


# -- tokens -----------------------------------------------------------------------------------------------------------


class CallSource(Protocol):
    """Whatever can fetch the recorded calls of a run; `langgraph_art.Client` does."""

    def calls(self, run_id: str) -> Sequence[RecordedCall]:
        """All calls that the server recorded for the run."""
        ...


class AsyncCallSource(Protocol):
    """Its async form; `langgraph_art.AsyncClient` is one."""

    async def calls(self, run_id: str) -> Sequence[RecordedCall]:
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
        _attach(run, client.calls(run.run_id))


async def aattach_tokens(runs: Iterable[GraphRun], client: AsyncCallSource) -> None:
    """Async twin of `attach_tokens`, for an `AsyncClient`."""
    for run in runs:
        _attach(run, await client.calls(run.run_id))


def _attach(run: GraphRun, recorded: Sequence[RecordedCall]) -> None:
    attempts = sorted(recorded, key=lambda call: call.attempt)
    complete = {call.call_id: call for call in attempts if call.status == "complete" and call.choice == 0}
    for call in run.calls:
        call.tokens = complete.get(call.call_id, call.tokens)
