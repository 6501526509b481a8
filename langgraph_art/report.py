"""What to show of a finished training: a table, a picture, and a summary for machines.

Invariant: reports only show what a history and evaluations hold; the measured numbers are never smoothed or chosen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from langgraph_art.errors import ArtError
from langgraph_art.history import Evaluation, TrainHistory


def comparison_table(
    untrained: Evaluation,
    trained: Evaluation,
    *,
    title: str = "Held-out inputs",
    measure: str = "reward",
    also: Mapping[str, tuple[float, float]] | None = None,
) -> Table:
    """A table for the terminal: the measure and each named part of it, before, after, and the change.

    Args:
        untrained: evaluation before the training.
        trained: evaluation after it, on the same inputs with the same measure.
        title: title of the table.
        measure: name of what was evaluated.
        also: further rows, untrained and trained value by name.
    """
    table = Table(title=title)
    table.add_column("mean over runs")
    for name, evaluation in (("untrained", untrained), ("trained", trained)):
        table.add_column("\n".join([name, *evaluation.versions]), justify="right")
    table.add_column("change", justify="right")
    rows = {measure: (untrained.mean, trained.mean)}
    for part in dict.fromkeys([*untrained.parts, *trained.parts]):
        rows[f"  {part}"] = (untrained.parts.get(part, 0.0), trained.parts.get(part, 0.0))
    rows |= also or {}
    for name, (before, after) in rows.items():
        table.add_row(name, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}")
    table.add_row(f"spread of {measure}", f"{untrained.std:.3f}", f"{trained.std:.3f}", "")
    table.add_row("runs", str(len(untrained.runs)), str(len(trained.runs)), "")
    if untrained.failed or trained.failed:
        table.add_row("runs without a reward", str(untrained.failed), str(trained.failed), "")
    return table


def plot_history(
    history: TrainHistory,
    path: Path | str,
    *,
    untrained: Evaluation | None = None,
    trained: Evaluation | None = None,
    title: str = "",
) -> None:
    """Draw the training reward, mean and spread over steps, and beside it the held-out means before and after.

    Args:
        history: the training; at least one step.
        path: the PNG file; its folder is made.
        untrained: held-out evaluation before the training.
        trained: held-out evaluation after it.
        title: title of the picture.

    Raises:
        ArtError: matplotlib is not installed, or the history is empty.
    """
    if not history.steps:
        raise ArtError("The history has no steps to plot. Call fit(steps) first.")
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ArtError("Plots need matplotlib: pip install 'langgraph-art[demo]'") from error

    held_out = [(name, e) for name, e in (("untrained", untrained), ("trained", trained)) if e is not None]
    figure = Figure(figsize=(9 if held_out else 7, 4), layout="constrained")
    axes = figure.subplots(1, 2, width_ratios=(3, 1), squeeze=False)[0] if held_out else [figure.subplots()]
    steps = [log.step for log in history.steps]
    means = [log.reward_mean for log in history.steps]
    low = [log.reward_mean - log.reward_std for log in history.steps]
    high = [log.reward_mean + log.reward_std for log in history.steps]
    curve = axes[0]
    curve.fill_between(steps, low, high, alpha=0.2, linewidth=0, label="± spread over runs")
    curve.plot(steps, means, marker="o", markersize=3, label="mean")
    curve.set(xlabel="step", ylabel="training reward", title=title)
    curve.xaxis.set_major_locator(MaxNLocator(integer=True))
    curve.legend(loc="best")
    curve.grid(alpha=0.3)
    if held_out:
        bars = axes[1].bar(
            [name for name, _ in held_out],
            [evaluation.mean for _, evaluation in held_out],
            color=["0.7", "C0"][-len(held_out) :],
        )
        axes[1].bar_label(bars, fmt="%.3f", padding=2)
        axes[1].set(title="held-out measure", ylabel="mean")
        axes[1].margins(y=0.15)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=150)


def summarize(
    history: TrainHistory,
    *,
    seed: int,
    untrained: Evaluation | None = None,
    trained: Evaluation | None = None,
) -> dict[str, Any]:
    """The numbers of a training for machines.

    Returns:
        ``heldout_before`` and ``heldout_after`` (mean held-out measure, ``None`` if not given), ``reward_before`` and
        ``reward_after`` (mean training reward of the first and the last step), ``train_seconds``, ``steps``, ``seed``.
    """
    return {
        "heldout_before": untrained.mean if untrained is not None else None,
        "heldout_after": trained.mean if trained is not None else None,
        "reward_before": history.steps[0].reward_mean if history.steps else None,
        "reward_after": history.steps[-1].reward_mean if history.steps else None,
        "train_seconds": round(history.train_seconds, 2),
        "steps": len(history.steps),
        "seed": seed,
    }


def write_summary(path: Path | str, summary: dict[str, Any]) -> None:
    """Write a summary as JSON, indented; the folder is made, an existing file is replaced in one step."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(target.name + ".tmp")
    draft.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    draft.replace(target)
