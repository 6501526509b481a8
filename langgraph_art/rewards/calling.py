"""Asking a reward, whatever its kind: sync or async, for one run or for a group.

Invariant: what a reward raises is the answer for its runs, never the end of the others; cancellation goes through.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from langgraph_art.rewards.scores import AnyReward, BadReward, GroupReward, RewardValue
from langgraph_art.runs import GraphRun


async def evaluate(reward: AnyReward, runs: Sequence[GraphRun]) -> list[RewardValue | Exception]:
    """The reward of each run, in order, or what was raised in its place.

    Args:
        reward: sync callbacks run in a thread.
        runs: finished runs; for a `GroupReward`, those of one group.
    """
    if not isinstance(reward, GroupReward):
        return list(await asyncio.gather(*(_one(reward, run) for run in runs)))
    if not runs:
        return []
    try:
        values = list(await call(reward.score_group, runs))
    except Exception as error:
        return [error] * len(runs)
    if len(values) != len(runs):
        return [BadReward(f"score_group returned {len(values)} rewards for {len(runs)} runs")] * len(runs)
    return values


async def _one(reward: Callable[[GraphRun], Any], run: GraphRun) -> RewardValue | Exception:
    try:
        value: RewardValue = await call(reward, run)
    except Exception as error:
        return error
    return value


async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a function returns: a sync one is run in a thread, and an async one awaited."""

    def guarded() -> Any:
        try:
            return function(*args, **kwargs)
        except StopIteration as error:  # such as next() without a default; a future cannot carry it and would hang
            raise RuntimeError("StopIteration, such as from next() without a default") from error

    value = guarded() if inspect.iscoroutinefunction(function) else await asyncio.to_thread(guarded)
    return await value if inspect.isawaitable(value) else value
