"""Rewards made of rewards: weighted sums, limits, gates, rewards by node.

Invariant: a combined reward shows what it is made of. Its named parts sum to it, parts of parts are named
``outer.inner``, and node rewards and explanations of the parts are kept. Each takes sync and async callbacks and group
rewards such as `Judge`; with a group reward among its parts the combined one is a group reward too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar

from langgraph_art.rewards.calling import evaluate
from langgraph_art.rewards.scores import AnyReward, BadReward, GroupReward, RewardValue, Score
from langgraph_art.runs import GraphRun

P = ParamSpec("P")
T = TypeVar("T")
_Values: TypeAlias = list[RewardValue | Exception]


def weighted_sum(parts: Mapping[str, AnyReward | tuple[float, AnyReward]]) -> AnyReward:
    """The sum of named parts: ``R = Σ w_k · r_k``.

    Args:
        parts: by name a reward, of weight 1, or ``(weight, reward)``. Node rewards of parts are weighted and added too.

    Raises:
        ValueError: there are no parts, or a weight is not finite.
    """
    if not parts:
        raise ValueError("weighted_sum: give at least one part, such as {'right': exact_match('answer')}")
    weighted = {name: part if isinstance(part, tuple) else (1.0, part) for name, part in parts.items()}
    if bad := [name for name, (weight, _) in weighted.items() if not math.isfinite(weight)]:
        raise ValueError(f"weighted_sum: the weight of {bad[0]!r} is not finite")

    async def values(runs: Sequence[GraphRun]) -> _Values:
        columns = {name: await evaluate(reward, runs) for name, (_, reward) in weighted.items()}
        rows = ({name: column[i] for name, column in columns.items()} for i in range(len(runs)))
        return [_guard(_sum, row, weighted) for row in rows]

    return _combined(values, *(reward for _, reward in weighted.values()))


def clip(reward: AnyReward, low: float = 0.0, high: float = 1.0) -> AnyReward:
    """The reward within limits: ``min(max(r, low), high)``. If it has parts, the difference is the part ``clip``.

    Raises:
        ValueError: ``low`` is above ``high``.
    """
    if not low <= high:
        raise ValueError(f"clip: low must not be above high, got {low} and {high}")

    def change(score: Score) -> Score:
        total = _total(score)
        inside = min(max(total, low), high)
        parts = {**score.reward, "clip": inside - total} if isinstance(score.reward, Mapping) else inside
        return Score(parts, score.nodes, score.info)

    return _mapped(reward, change)


def at_least(reward: AnyReward, threshold: float) -> AnyReward:
    """A graded reward as a check: 1.0 if ``r >= threshold``, else 0.0."""
    return _mapped(reward, lambda score: Score(float(_total(score) >= threshold), {}, score.info))


def gate(checks: Mapping[str, AnyReward], then: AnyReward, *, failed: float = 0.0) -> AnyReward:
    """The reward of runs that pass all checks; the others get ``failed``, and the name of the first check they fail.

    Checks are asked in order and only until one fails; a group reward in ``then`` compares only runs that passed.

    Args:
        checks: by name; a run passes if the value is above 0. `at_least` makes a check of a graded reward.
        then: the reward of runs that pass.
        failed: the reward of the others, as the part that is named as the check; ``reward_info["failed_check"]`` has
            the name too.

    Raises:
        ValueError: there are no checks.
    """
    if not checks:
        raise ValueError("gate: give at least one check, such as {'format': matches(r'\\d+')}")

    async def values(runs: Sequence[GraphRun]) -> _Values:
        found: dict[int, RewardValue | Exception] = {}
        for name, check in checks.items():
            asked = [i for i in range(len(runs)) if i not in found]
            for i, value in zip(asked, await evaluate(check, [runs[i] for i in asked]), strict=True):
                graded = _guard(lambda value: _total(_score(value)), value)
                if isinstance(graded, Exception):
                    found[i] = graded
                elif graded <= 0:
                    found[i] = Score({name: failed}, info={"failed_check": name})
        asked = [i for i in range(len(runs)) if i not in found]
        found |= dict(zip(asked, await evaluate(then, [runs[i] for i in asked]), strict=True))
        return [found[i] for i in range(len(runs))]

    return _combined(values, *checks.values(), then)


def per_node(reward: AnyReward, nodes: Mapping[str, AnyReward]) -> AnyReward:
    """A reward for the run, and beside it rewards for nodes, for ``TrainConfig(node_advantage=...)``.

    Args:
        reward: of the run.
        nodes: by node, as `GraphRun.calls_at` takes it: its reward, which gets the run with that node's calls only. A
            node that a run did not call gets none.

    Raises:
        ValueError: there are no nodes.
    """
    if not nodes:
        raise ValueError("per_node: give at least one node with its reward")

    async def values(runs: Sequence[GraphRun]) -> _Values:
        whole = await evaluate(reward, runs)
        by_run: list[dict[str, RewardValue | Exception]] = [{} for _ in runs]
        for node, part in nodes.items():
            there = [i for i, run in enumerate(runs) if any(call.art for call in run.calls_at(node))]
            only = [runs[i].model_copy(update={"calls": runs[i].calls_at(node)}) for i in there]
            for i, value in zip(there, await evaluate(part, only), strict=True):
                by_run[i][node] = value
        return [_guard(_with_nodes, value, own) for value, own in zip(whole, by_run, strict=True)]

    return _combined(values, reward, *nodes.values())


# -- inside -----------------------------------------------------------------------------------------------------------


class _Grouped:
    def __init__(self, values: Callable[[Sequence[GraphRun]], Awaitable[_Values]]) -> None:
        self._values = values

    async def score_group(self, runs: Sequence[GraphRun], /) -> Sequence[RewardValue | Exception]:
        return await self._values(runs)


def _combined(values: Callable[[Sequence[GraphRun]], Awaitable[_Values]], *parts: AnyReward) -> AnyReward:
    """A group reward if a part is one, which must wait for the whole group; else one for each run."""
    for part in parts:
        if not isinstance(part, GroupReward) and not callable(part):
            raise ValueError(f"a reward is a function of the run or has score_group, but this is {part!r}")
    if any(isinstance(part, GroupReward) for part in parts):
        return _Grouped(values)

    async def reward(run: GraphRun) -> RewardValue:
        (value,) = await values([run])
        if isinstance(value, Exception):
            raise value
        return value

    return reward


def _mapped(reward: AnyReward, change: Callable[[Score], Score]) -> AnyReward:
    async def values(runs: Sequence[GraphRun]) -> _Values:
        found = await evaluate(reward, runs)
        return [_guard(lambda value: change(_score(value)), value) for value in found]

    return _combined(values, reward)


def _guard(compute: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | Exception:
    try:
        return compute(*args, **kwargs)
    except Exception as error:
        return error


def _score(value: RewardValue | Exception) -> Score:
    if isinstance(value, Exception):
        raise value
    if value is None:
        raise BadReward("it returned None: is a return missing?")
    return value if isinstance(value, Score) else Score(value)


def _total(score: Score) -> float:
    value = score.reward
    return math.fsum(value.values()) if isinstance(value, Mapping) else float(value)


def _sum(row: Mapping[str, RewardValue | Exception], weighted: Mapping[str, tuple[float, AnyReward]]) -> Score:
    parts: dict[str, float] = {}
    nodes: defaultdict[str, float] = defaultdict(float)
    info: dict[str, Any] = {}
    for name, value in row.items():
        weight = weighted[name][0]
        try:
            score = _score(value)
            if isinstance(score.reward, Mapping):
                parts |= {f"{name}.{inner}": weight * float(part) for inner, part in score.reward.items()}
            else:
                parts[name] = weight * float(score.reward)
        except Exception as error:
            said = str(error) if isinstance(error, BadReward) else f"{type(error).__name__}: {error}"
            raise BadReward(f"part {name!r}: {said}") from error
        for node, part in score.nodes.items():
            nodes[node] += weight * part
        if score.info:
            info[name] = dict(score.info)
    return Score(parts, nodes, info)


def _with_nodes(value: RewardValue | Exception, nodes: Mapping[str, RewardValue | Exception]) -> Score:
    score = _score(value)
    found, info = dict(score.nodes), dict(score.info)
    for node, given in nodes.items():
        try:
            own = _score(given)
        except Exception as error:
            raise BadReward(f"reward of node {node!r}: {type(error).__name__}: {error}") from error
        found[node] = _total(own)
        if own.info:
            info[node] = dict(own.info)
    return Score(score.reward, found, info)
