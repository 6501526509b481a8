"""A report against reward hacking: the answers with the highest rewards, and those whose reward changed most.

Invariant: it shows whole answers beside their rewards, so that a person sees what the number cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from langgraph_art.history import Evaluation
from langgraph_art.rewards.parts import Get, answer_of
from langgraph_art.rewards.scores import BadReward
from langgraph_art.runs import GraphRun, RunGroup


@dataclass(frozen=True)
class Reviewed:
    """An input's best run in each of two evaluations."""

    before: GraphRun
    after: GraphRun

    @property
    def change(self) -> float:
        """Reward after minus reward before."""
        return (self.after.reward or 0.0) - (self.before.reward or 0.0)


def review(before: Evaluation, after: Evaluation, *, count: int = 3) -> tuple[list[Reviewed], list[Reviewed]]:
    """The most rewarded inputs after, and those whose reward changed most, up or down.

    Args:
        before: an evaluation.
        after: a later one, on the same inputs in the same order.
        count: how many of each.

    Returns:
        Both lists, the most rewarded or most changed first. Inputs without a scored run in both are left out.

    Raises:
        ValueError: the evaluations have different numbers of inputs, or the count is below 1.
    """
    if len(before.groups) != len(after.groups) or count < 1:
        raise ValueError(
            f"review: needs two evaluations of the same inputs and a count of at least 1; got {len(before.groups)} and "
            f"{len(after.groups)} inputs, count={count}"
        )
    best = [(_best(old), _best(new)) for old, new in zip(before.groups, after.groups, strict=True)]
    pairs = [Reviewed(old, new) for old, new in best if old is not None and new is not None]
    rewarded = sorted(pairs, key=lambda pair: -(pair.after.reward or 0.0))
    changed = sorted(pairs, key=lambda pair: -abs(pair.change))
    return rewarded[:count], changed[:count]


def review_table(before: Evaluation, after: Evaluation, *, answer: Get | None = None, count: int = 3) -> Table:
    """What `review` finds, as a table for the terminal.

    Args:
        before: an evaluation.
        after: a later one, on the same inputs in the same order.
        answer: as in `answer_of`.
        count: rows of each kind.

    Raises:
        ValueError: as `review`.
    """
    rewarded, changed = review(before, after, count=count)
    table = Table(title="Is the reward what you mean?", show_lines=True)
    for name in ("", "input", "answer before", "answer after", "reward"):
        table.add_column(name)
    for kind, pairs in (("most rewarded", rewarded), ("most changed", changed)):
        for pair in pairs:
            numbers = f"{pair.before.reward:.3f} → {pair.after.reward:.3f}"
            cells = (kind, str(pair.after.input), _told(pair.before, answer), _told(pair.after, answer), numbers)
            table.add_row(*map(Text, cells))  # not markup: an answer may hold brackets
    return table


def _best(group: RunGroup) -> GraphRun | None:
    scored: Sequence[GraphRun] = [run for run in group.runs if run.reward is not None]
    return max(scored, key=lambda run: run.reward or 0.0, default=None)


def _told(run: GraphRun, answer: Get | None) -> str:
    if run.error is not None:
        return f"{run.error.type}: {run.error.message}"
    try:
        return str(answer_of(run, answer))
    except BadReward:
        return str(run.output)
