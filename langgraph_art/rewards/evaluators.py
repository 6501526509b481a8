"""Evaluators of other packages as rewards: whatever is called with ``inputs``, ``outputs`` and ``reference_outputs``.

Invariant: an evaluator's own model calls are in a graph run of their own, never in the one it scores.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from langgraph_art.rewards.calling import call
from langgraph_art.rewards.parts import Get, answer_of, expected_of
from langgraph_art.rewards.scores import BadReward, Score
from langgraph_art.runs import GraphRun


def from_evaluator(
    evaluator: Callable[..., Any],
    *,
    outputs: Get | None = None,
    reference_outputs: Get | None = None,
    inputs: Get | None = None,
) -> Callable[[GraphRun], Awaitable[Score]]:
    """An evaluator of ``openevals`` or ``agentevals``, or one with their signature, as a reward.

    It returns a dict with ``key``, ``score`` (a number or truth value) and ``comment``, or a list of such. Each key
    becomes a named part; comments are kept in ``reward_info``.

    Args:
        evaluator: sync (run in a thread) or async.
        outputs: as ``answer`` of `answer_of`; for evaluators of trajectories the key of the messages.
        reference_outputs: a key of the input, or a function of the run; not passed by default.
        inputs: likewise; default: the whole input of the run.
    """

    async def reward(run: GraphRun) -> Score:
        from langgraph_art.recording import record  # attaches itself to LangChain, so only when it is needed

        given = {
            "inputs": run.input if inputs is None else expected_of(run, inputs),
            "outputs": _outputs(run, outputs),
        }
        if reference_outputs is not None:
            given["reference_outputs"] = expected_of(run, reference_outputs)
        with record(metadata={"evaluates": run.run_id}):
            return _as_score(await call(evaluator, **given))

    return reward


def _outputs(run: GraphRun, outputs: Get | None) -> Any:
    if isinstance(outputs, str) and isinstance(run.output, Mapping) and outputs in run.output:
        return run.output[outputs]  # as it is: messages stay messages
    return None if run.output is None else answer_of(run, outputs)


def _as_score(found: Any) -> Score:
    results = found if isinstance(found, list) else [found]
    parts: dict[str, float] = {}
    comments: dict[str, str] = {}
    for result in results:
        if not isinstance(result, Mapping) or "key" not in result or result.get("score") is None:
            raise BadReward(f"the evaluator returned {result!r}, where a dict with key and score is needed")
        if result["key"] in parts:
            raise BadReward(f"the evaluator returned the key {result['key']!r} twice")
        parts[str(result["key"])] = float(result["score"])
        if result.get("comment"):
            comments[str(result["key"])] = str(result["comment"])
    if not parts:
        raise BadReward("the evaluator returned no result")
    return Score(parts, info={"comments": comments} if comments else {})
