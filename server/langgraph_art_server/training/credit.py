"""Credit per node: the advantage of each call, from the reward of its run and that of its node.

With ``A_i`` the advantage of run i in its group, ``R_in`` its mean node reward at node n and ``lambda`` the option
``node_advantage``, a call of run i at node n has the advantage

    A_i + lambda * (R_in - mean of R_jn over the runs j of the group that have a reward at n).

With ``agent_wise`` the first term compares run i with the runs of its group that called n only (Dr. MAS,
https://arxiv.org/abs/2602.08847). Invariant: statistics are over runs, so a run that calls a node ten times counts as
much as one that calls it once, and a run that never calls it does not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from langgraph_art.protocol import TrainConfig
from langgraph_art_server.training.advantages import TOLERANCE, group_advantages
from langgraph_art_server.training.task import TaskGroup, TaskRun

Credit = list[list[dict[str, float]] | None]
"""For each group, for each of its runs: the advantage of its calls by node path. ``None``: it has under two runs."""


def call_advantages(groups: Sequence[TaskGroup], config: TrainConfig) -> tuple[Credit, Counter[str]]:
    """Computes the advantage of every call.

    Args:
        groups: One policy's groups. A run counts in the mean of its group without any calls, and in that of a node
            with calls that are not trained (``TaskRun.nodes``).
        config: ``scale`` divides the first term; with ``agent_wise`` by the deviation over the runs that called the
            node. The second term is only centred: ``node_advantage`` gives it its size.

    Returns:
        The advantages; and for how many nodes of a group fewer than two runs could be compared, which leaves that term
        0 (``node:too_few_runs``), and how many runs have no reward at a node where others of their group have one,
        which leaves their second term 0 (``node:no_reward``).

    Raises:
        ValueError: If a reward is not a finite number.
    """
    skipped: Counter[str] = Counter()
    graph = group_advantages([[run.reward for run in group.runs] for group in groups], config.scale)
    credit: Credit = [
        None
        if values is None
        else [dict.fromkeys(_trained(run), value) for run, value in zip(group.runs, values, strict=True)]
        for group, values in zip(groups, graph, strict=True)
    ]
    for node in sorted({node for group in groups for run in group.runs for node in _trained(run)}):
        callers = [[run for run in group.runs if node in _trained(run) | {*run.nodes}] for group in groups]
        graph_terms = _compare([{run.run_id: run.reward for run in runs} for runs in callers], config.scale)
        node_terms = _compare(
            [{run.run_id: run.node_rewards[node] for run in runs if node in run.node_rewards} for runs in callers],
            "none",
        )
        for index, advantages in enumerate(credit):
            if advantages is None:
                continue
            compared = [graph_terms[index]] * config.agent_wise + [node_terms[index]] * (config.node_advantage > 0)
            skipped["node:too_few_runs"] += any(len(terms) == 1 for terms in compared)
            for run, of_node in zip(groups[index].runs, advantages, strict=True):
                if node not in of_node:
                    continue
                if config.agent_wise:
                    of_node[node] = graph_terms[index][run.run_id]
                if config.node_advantage:
                    skipped["node:no_reward"] += bool(node_terms[index]) and run.run_id not in node_terms[index]
                    term = config.node_advantage * node_terms[index].get(run.run_id, 0.0)
                    of_node[node] = _sum(of_node[node], term)
    return credit, +skipped


def _trained(run: TaskRun) -> set[str]:
    return {call.node for call in run.calls}


def _compare(groups: list[dict[str, float]], scale: Literal["none", "group", "batch"]) -> list[dict[str, float]]:
    """Advantages of values by run id; 0 in a group of one."""
    compared = group_advantages([list(values.values()) for values in groups], scale)
    return [
        dict.fromkeys(values, 0.0) if advantages is None else dict(zip(values, advantages, strict=True))
        for values, advantages in zip(groups, compared, strict=True)
    ]


def _sum(first: float, second: float) -> float:
    """The sum, and 0 where the terms cancel but for float noise."""
    total = first + second
    return 0.0 if abs(total) <= TOLERANCE * max(abs(first), abs(second)) else total
