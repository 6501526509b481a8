"""What a reward callback may return: a number, named parts, or a score for the run and for its nodes.

Invariant: a run gets a whole reward or none. If a number is not finite, or is for a node that the run did not call,
the run has no reward, and the error names what was wrong.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

from langgraph_art.runs import GraphRun


@dataclass(frozen=True)
class Score:
    """A reward for the run, and beside it rewards for nodes: ``Score(1.0, nodes={"planner": 0.5})``.

    Node rewards say which node did well where the run's outcome alone does not. They count with
    ``TrainConfig(node_advantage=...)``, in comparison with the same node in the other runs of the group.
    """

    reward: float | Mapping[str, float]
    """A number, or named parts whose sum is the reward."""
    nodes: Mapping[str, float] = field(default_factory=dict)
    """Reward of the run at a node, the mean if it called the node several times. The node is given as in
    ``GraphRun.calls_at``: by name, by path, or by the name of the subgraph, all of whose nodes then get it."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """What explains the reward, such as a judge's reasons; kept as ``GraphRun.reward_info``. Any JSON data."""


RewardValue: TypeAlias = float | Mapping[str, float] | Score
Reward: TypeAlias = Callable[[GraphRun], RewardValue | Awaitable[RewardValue]]
"""Gets a finished run, returns its reward, named parts of it whose sum is the reward, or a `Score`. May be async."""


@runtime_checkable
class GroupReward(Protocol):
    """Scores the runs of a group together, when all of them have ended. `Judge` is one.

    Runs that failed for reasons outside the policy are left out, and so are those that got ``on_error=``.
    """

    def score_group(
        self, runs: Sequence[GraphRun], /
    ) -> Sequence[RewardValue | Exception] | Awaitable[Sequence[RewardValue | Exception]]:
        """A reward for each run, in order. Sync (run in a thread) or async.

        An exception in the place of a reward marks that run only; one that is raised marks all of them.
        """
        ...


AnyReward: TypeAlias = Reward | GroupReward
"""What `rollout`, `score` and the combinators take."""


class BadReward(Exception):
    """Something that is no reward was returned, or a part of a reward cannot be computed from this run."""


def set_reward(run: GraphRun, value: RewardValue) -> None:
    """Store what a reward callback returned.

    Args:
        run: gets ``reward``, ``reward_parts``, ``node_rewards`` and ``reward_info``, all or none of them.
        value: the reward, its named parts, or a `Score`.

    Raises:
        BadReward: there is no number, one is not finite, or a node is none that called a policy in this run.
        TypeError, ValueError: something is no number.
    """
    total, nodes, info = (value.reward, value.nodes, value.info) if isinstance(value, Score) else (value, {}, {})
    if total is None:
        raise BadReward("it returned None: is a return missing?")
    parts = {str(name): float(part) for name, part in total.items()} if isinstance(total, Mapping) else {}
    reward = math.fsum(parts.values()) if isinstance(total, Mapping) else float(total)
    if not math.isfinite(reward):
        raise BadReward(f"it returned {total!r}, which is not a finite number")
    node_rewards: dict[str, float] = {}
    for name, given in nodes.items():
        paths = {call.node for call in run.calls_at(name) if call.art}
        if not paths:
            called = ", ".join(sorted({call.node for call in run.calls if call.art})) or "none"
            raise BadReward(f"it rewards the node {name!r}, but the nodes that called a policy are: {called}")
        if not math.isfinite(given):
            raise BadReward(f"its reward for the node {name!r} is {given!r}, which is not a finite number")
        if twice := paths & node_rewards.keys():
            raise BadReward(f"it rewards the node {min(twice)!r} twice, the second time as {name!r}")
        node_rewards |= dict.fromkeys(paths, float(given))
    run.reward, run.reward_parts, run.node_rewards, run.reward_info = reward, parts, node_rewards, dict(info)
