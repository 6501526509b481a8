"""Ready-made rewards for common needs, each a function that makes a reward callback.

Invariant: a run that failed has no answer, and gets 0 from every part that looks at one. What the run cannot tell, such
as tokens that a provider did not report, is an error of that run, never a guess.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from langchain_core.messages import BaseMessage

from langgraph_art.errors import ArtError
from langgraph_art.rewards.scores import BadReward
from langgraph_art.runs import GraphRun, NodeCall

Get: TypeAlias = str | Callable[[GraphRun], Any]
"""Where a value is: a key, or a function of the run."""
Part: TypeAlias = Callable[[GraphRun], float]


def answer_of(run: GraphRun, answer: Get | None = None) -> Any:
    """The answer of a run: by default text of the last message of its output, or the output if that is text.

    Args:
        run: a finished run.
        answer: a key of ``run.output``, or a function of the run. A message becomes its text.

    Raises:
        BadReward: the output has no such key, or no messages and no key is given.
    """
    if callable(answer):
        return answer(run)
    found = run.output
    if answer is not None:
        found = _key(found, answer, "output")
    elif isinstance(found, Mapping):
        messages = found.get("messages")
        if not isinstance(messages, Sequence) or not messages:
            keys = ", ".join(map(str, found)) or "none"
            raise BadReward(f"the output has no messages; say which key is the answer. Its keys are: {keys}")
        found = messages[-1]
    return found.text if isinstance(found, BaseMessage) else found


def expected_of(run: GraphRun, expected: Get) -> Any:
    """What was expected: a key of ``run.input``, or what the function returns.

    Raises:
        BadReward: the input has no such key.
    """
    return expected(run) if callable(expected) else _key(run.input, expected, "input")


def _key(value: Any, key: str, what: str) -> Any:
    if not isinstance(value, Mapping) or key not in value:
        has = ", ".join(map(str, value)) if isinstance(value, Mapping) else f"none, it is {type(value).__name__}"
        raise BadReward(f"the {what} has no key {key!r}; its keys are: {has}")
    return value[key]


# -- answers ----------------------------------------------------------------------------------------------------------


def exact_match(expected: Get, *, answer: Get | None = None) -> Part:
    """1.0 if the answer equals what was expected, else 0.0. Texts are compared without outer white space."""

    def reward(run: GraphRun) -> float:
        if run.error is not None:
            return 0.0
        return float(_stripped(answer_of(run, answer)) == _stripped(expected_of(run, expected)))

    return reward


def fuzzy_match(expected: Get, *, answer: Get | None = None, ignore_case: bool = True) -> Part:
    """Likeness of two texts from 0 to 1: ``2·M / T``, with M characters in matching blocks of T in both (difflib)."""

    def reward(run: GraphRun) -> float:
        if run.error is not None:
            return 0.0
        said, wanted = str(answer_of(run, answer)).strip(), str(expected_of(run, expected)).strip()
        if ignore_case:
            said, wanted = said.casefold(), wanted.casefold()
        return difflib.SequenceMatcher(None, wanted, said, autojunk=False).ratio()

    return reward


def matches(pattern: str, *, answer: Get | None = None, whole: bool = True, flags: int = 0) -> Part:
    """1.0 if the answer matches a regular expression: the whole of it, or with ``whole=False`` any part.

    Raises:
        ValueError: the pattern is no regular expression.
    """
    try:
        compiled = re.compile(pattern, flags)
    except re.error as error:
        raise ValueError(f"matches({pattern!r}): {error}") from error

    def reward(run: GraphRun) -> float:
        if run.error is not None:
            return 0.0
        text = str(answer_of(run, answer)).strip()
        return float((compiled.fullmatch(text) if whole else compiled.search(text)) is not None)

    return reward


def json_schema(schema: Mapping[str, Any], *, answer: Get | None = None) -> Part:
    """1.0 if the answer, JSON text or data, fits a JSON schema, else 0.0.

    Raises:
        ArtError: jsonschema is not installed.
        ValueError: the schema is none.
    """
    try:
        from jsonschema.exceptions import SchemaError  # type: ignore[import-untyped]
        from jsonschema.validators import validator_for  # type: ignore[import-untyped]
    except ImportError as error:
        raise ArtError("json_schema needs the package jsonschema: pip install jsonschema") from error
    kind = validator_for(schema)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"json_schema: this is no JSON schema: {error.message}") from error
    validator = kind(schema)

    def reward(run: GraphRun) -> float:
        if run.error is not None:
            return 0.0
        data = answer_of(run, answer)
        if isinstance(data, str):
            try:
                data = json.loads(data)
            except ValueError:
                return 0.0
        return float(validator.is_valid(data))

    return reward


def _stripped(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


# -- tools ------------------------------------------------------------------------------------------------------------


def tool_called(
    name: str,
    *,
    args: Mapping[str, Any] | Callable[[Mapping[str, Any]], bool] | None = None,
    node: str | None = None,
    at_least: int = 1,
    at_most: int | None = None,
) -> Part:
    """1.0 if models asked for a tool as often as wanted, else 0.0. ``at_least=0, at_most=0`` forbids it.

    Args:
        name: of the tool.
        args: counts only calls with these arguments (others may be there too), or for which the function is true.
        node: counts only calls at this node, as `GraphRun.calls_at` takes it.
        at_least: fewest calls.
        at_most: most calls; no limit by default.

    Raises:
        ValueError: the limits contradict each other.
    """
    if at_least < 0 or (at_most is not None and at_most < at_least):
        raise ValueError(f"tool_called: no number of calls is at least {at_least} and at most {at_most}")

    def fits(given: Mapping[str, Any]) -> bool:
        if callable(args):
            return bool(args(given))
        return all(key in given and given[key] == value for key, value in (args or {}).items())

    def reward(run: GraphRun) -> float:
        count = sum(tool == name and fits(given) for tool, given in tool_calls(run, node))
        return float(count >= at_least and (at_most is None or count <= at_most))

    return reward


def tools_in_order(*names: str, node: str | None = None) -> Part:
    """1.0 if models asked for these tools in this order, others between them or not; else 0.0.

    Raises:
        ValueError: no tool is named.
    """
    if not names:
        raise ValueError("tools_in_order: name at least one tool")

    def reward(run: GraphRun) -> float:
        asked = iter([tool for tool, _ in tool_calls(run, node)])
        return float(all(name in asked for name in names))

    return reward


def tool_calls(run: GraphRun, node: str | None = None) -> list[tuple[str, Mapping[str, Any]]]:
    """Name and arguments of each tool call that models asked for and the graph got, in order."""
    return [
        (str(tool["name"]), tool.get("args") or {})
        for call in _delivered(run, node)
        for tool in (call.response or {}).get("tool_calls") or ()
    ]


def _delivered(run: GraphRun, node: str | None) -> list[NodeCall]:
    return [call for call in (run.calls if node is None else run.calls_at(node)) if call.delivered]


# -- time, length, money ----------------------------------------------------------------------------------------------


def latency(run: GraphRun) -> float:
    """Wall-clock seconds of the run, as a negative number: ``R = -seconds``."""
    return -run.seconds


def tokens(*, node: str | None = None) -> Part:
    """Sampled tokens as a negative number: ``R = -Σ output tokens``, of all calls or of those at a node."""
    return lambda run: -float(_sampled(run, node))


def length_penalty(free: int, limit: int, *, most: float = 1.0, node: str | None = None) -> Part:
    """A penalty that grows with sampled tokens L: ``-most · min(max(L - free, 0) / (limit - free), 1)``.

    The soft overlong punishment of DAPO (https://arxiv.org/abs/2503.14476), over a whole run.

    Args:
        free: tokens without penalty.
        limit: tokens from which the penalty is ``most``.
        most: the largest penalty, positive.
        node: counts only calls at this node.

    Raises:
        ValueError: the numbers are out of order.
    """
    if not (0 <= free < limit and most > 0):
        raise ValueError(f"length_penalty: need 0 <= free < limit and most > 0, got {free}, {limit} and {most}")

    def reward(run: GraphRun) -> float:
        over = (_sampled(run, node) - free) / (limit - free)
        return -most * min(max(over, 0.0), 1.0)

    return reward


def cost_penalty(prices: Mapping[str, tuple[float, float]], *, per_unit: float = 1.0) -> Part:
    """The money that a run cost, negative: ``-per_unit · Σ (input · price_in + output · price_out) / 10⁶``.

    Args:
        prices: by model name, as the calls ask for it: price of a million input and output tokens.
        per_unit: reward lost for one unit of money.

    Raises:
        BadReward: (from the callback) a call is of a model without a price, or reported no usage.
    """

    def reward(run: GraphRun) -> float:
        cost = 0.0
        for call in _delivered(run, None):
            if call.model not in prices:
                raise BadReward(f"cost_penalty has no price for the model {call.model!r} of node {call.node!r}")
            read, written = _usage(call)
            cost += (read * prices[call.model][0] + written * prices[call.model][1]) / 1e6
        return -per_unit * cost

    return reward


def _sampled(run: GraphRun, node: str | None) -> int:
    return sum(_usage(call)[1] for call in _delivered(run, node))


def _usage(call: NodeCall) -> tuple[int, int]:
    if call.usage is None:
        raise BadReward(f"the model {call.model!r} at node {call.node!r} reported no token usage")
    return int(call.usage["input_tokens"]), int(call.usage["output_tokens"])
