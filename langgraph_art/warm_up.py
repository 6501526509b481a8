"""What supervised fine-tuning learns from: recorded runs, single calls of any chat model, conversations from a file.

Invariant: an example is the answer of one call, or the assistant's messages of one conversation, and what was before
each. Calls that the server recorded are sent by id only; for those of other models the messages are sent, and the
server makes tokens of them with the policy's own chat template.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from langchain_core.messages import convert_to_openai_messages, messages_from_dict
from pydantic import ValidationError

from langgraph_art.errors import ArtError, NothingToTrain
from langgraph_art.protocol import ChatExample, RecordedExample, SftConfig, SftSubmission
from langgraph_art.redaction import redact
from langgraph_art.runs import FORMAT, GraphRun, NodeCall, RunGroup, load_runs

Example = GraphRun | RunGroup | NodeCall | Mapping[str, Any]
"""A run or a group, of which the calls are taken; a call; or a conversation ``{"messages": [...], "tools": [...]}`` in
OpenAI's chat format, whose assistant messages are all learned unless they have ``"weight": 0``."""


def make_sft(
    policy: str,
    examples: Iterable[Example],
    *,
    config: SftConfig | None = None,
    nodes: Sequence[str] | None = None,
    idempotency_key: str | None = None,
) -> tuple[SftSubmission, dict[str, int]]:
    """Turn examples into what the server is sent.

    Args:
        policy: policy to fine-tune.
        examples: what to learn from. Of runs and groups the calls that reached the graph are taken, and of these:
        nodes: those at or below one of these nodes (as in `GraphRun.calls_at`), whatever model answered. Default: those
            that were made to ``policy`` by name.
        config: how to train; default: ``SftConfig()``.
        idempotency_key: default: a hash of all of the above, so that sending the same examples again is safe; the first
            job is then answered. Give a key of your own to learn the same examples once more.

    Returns:
        The submission, and the count of calls left out, by reason.

    Raises:
        NothingToTrain: no example is left.
        ArtError: an example is none, or something else cannot be sent; the message says where.
    """
    left_out: Counter[str] = Counter()
    found: list[RecordedExample | ChatExample] = []
    models: set[str] = set()
    for number, example in enumerate(examples, 1):
        try:
            if isinstance(example, RunGroup):
                for run in example.runs:
                    found += _of_run(run, policy, nodes, left_out, models)
            elif isinstance(example, GraphRun):
                found += _of_run(example, policy, nodes, left_out, models)
            elif isinstance(example, NodeCall):
                found += _of_call(example, None, left_out)
            else:
                found.append(ChatExample.model_validate(dict(example)))
        except (ValidationError, TypeError, ValueError) as error:
            raise ArtError(f"Example {number} cannot be learned: {_reason(error)}") from error
    if not found:
        asked = (
            f" Their calls asked for {', '.join(sorted(models))}: name nodes= to learn from these." if models else ""
        )
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items()))
        raise NothingToTrain(
            f"There is no example for policy {policy!r}.{f' Left out: {counts}.' if counts else ''}{asked}"
        )
    try:
        found = [_redacted(example) for example in found]
    except ValidationError as error:
        raise ArtError(f"The redaction function made a conversation that is none: {_reason(error)}") from error
    config = config or SftConfig()
    if idempotency_key is None:
        identity = [policy, [example.model_dump(mode="json") for example in found], config.model_dump(mode="json")]
        idempotency_key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    try:
        return (
            SftSubmission(idempotency_key=idempotency_key, policy=policy, examples=found, config=config),
            dict(left_out),
        )
    except ValidationError as error:
        raise ArtError(f"These examples cannot be sent: {_reason(error)}") from error


def load_examples(path: str | os.PathLike[str], *, min_reward: float | None = None) -> list[Example]:
    """Read examples from a JSON Lines file: one of `save_runs`, or one conversation in OpenAI's chat format a line.

    Args:
        path: the file.
        min_reward: of runs, only those with at least this reward; runs without one are left out then.

    Raises:
        ArtError: a line is neither, or ``min_reward`` is given for conversations, which have none.
    """
    source = Path(path)
    if not source.is_file():
        raise ArtError(f"There is no file {source}.")
    examples: list[Example] = []
    with source.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                data = json.loads(line)
            except ValueError as error:
                raise ArtError(f"{source}, line {number}: not valid JSON ({error}).") from error
            if isinstance(data, dict) and data.get("format") == FORMAT:
                runs = load_runs(source)
                return [
                    run for run in runs if min_reward is None or (run.reward is not None and run.reward >= min_reward)
                ]
            if not isinstance(data, dict) or not isinstance(data.get("messages"), list):
                raise ArtError(
                    f'{source}, line {number}: neither a graph run nor a conversation {{"messages": [...]}}.'
                )
            examples.append(data)
    if min_reward is not None:
        raise ArtError(f"{source} has no runs, so no rewards either: leave the smallest reward out.")
    return examples


def _of_run(
    run: GraphRun, policy: str, nodes: Sequence[str] | None, left_out: Counter[str], models: set[str]
) -> list[RecordedExample | ChatExample]:
    if nodes is None:
        calls = [call for call in run.calls if call.art and call.model.partition("@")[0] == policy]
        models.update(call.model for call in run.calls)
    else:
        at = {id(call) for node in nodes for call in run.calls_at(node)}
        calls = [call for call in run.calls if id(call) in at]
    return [example for call in calls for example in _of_call(call, run.run_id, left_out)]


def _of_call(call: NodeCall, run_id: str | None, left_out: Counter[str]) -> list[RecordedExample | ChatExample]:
    """The answer of a call as an example, or nothing, counted."""
    if not call.delivered:
        left_out["call:not_delivered"] += 1
        return []
    if call.art:
        return [RecordedExample(call_id=call.call_id, run_id=run_id)]
    if call.response is None:
        left_out["call:no_answer"] += 1
        return []
    # Imported here: the OpenAI SDK takes a second, and most uses of the client do without.
    from langchain_core.utils.function_calling import convert_to_openai_tool

    from langgraph_art.messages import prepare

    messages = messages_from_dict([{"type": data["type"], "data": data} for data in [*call.messages, call.response]])
    payload: dict[str, Any] = {"messages": convert_to_openai_messages(messages)}
    if call.tools:
        payload["tools"] = [convert_to_openai_tool(tool) for tool in call.tools]
    prepare(payload, messages)
    for sent in payload["messages"][:-1]:
        if sent["role"] == "assistant":
            sent["weight"] = 0  # what it was given, not what it answered
    return [ChatExample(**payload, run_id=run_id)]


def _redacted(example: RecordedExample | ChatExample) -> RecordedExample | ChatExample:
    """The example as it may leave the process; one that the server recorded holds no text."""
    if isinstance(example, RecordedExample):
        return example
    given = copy.deepcopy(example.model_dump())  # the function may change what it gets
    shared = {name: given[name] and [redact(part) for part in given[name]] for name in ("messages", "tools")}
    return ChatExample.model_validate(given | shared)


def _reason(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(": ".join([*map(str, problem["loc"]), problem["msg"]]) for problem in error.errors())
