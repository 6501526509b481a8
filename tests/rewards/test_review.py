"""The report shows the most rewarded and the most changed answers of two evaluations."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from langgraph_art.history import Evaluation
from langgraph_art.rewards.review import review, review_table
from langgraph_art.runs import RunGroup

from .conftest import run


def evaluation(**rewards: float | None) -> Evaluation:
    groups = []
    for name, reward in rewards.items():
        done = run(f"[b]{name}")
        done.reward = reward
        groups.append(RunGroup(group_id=name, runs=[done]))
    return Evaluation.of(groups)


def test_most_rewarded_and_most_changed() -> None:
    before, after = evaluation(a=0.9, b=0.8, c=0.1, d=0.0), evaluation(a=1.0, b=0.0, c=0.2, d=None)
    rewarded, changed = review(before, after, count=2)
    assert [pair.after.reward for pair in rewarded] == [1.0, 0.2]
    assert [round(pair.change, 3) for pair in changed] == [-0.8, 0.1]
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(review_table(before, after, answer="answer", count=1))
    text = console.export_text()
    assert "[b]a" in text
    assert "0.800 → 0.000" in text
    with pytest.raises(ValueError, match="got 4 and 1 inputs"):
        review(before, evaluation(a=1.0))
