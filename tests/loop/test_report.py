"""Tables, pictures and summaries of a training."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from langgraph_art.errors import ArtError
from langgraph_art.history import Evaluation, Scores, TrainHistory
from langgraph_art.report import comparison_table, plot_history, summarize, write_summary
from langgraph_art.runs import GraphRun, NodeCall, RunError, RunGroup

from .test_progress import step

BROKEN = RunError(type="TimeoutError", message="late", node=None, infrastructure=True)


def evaluation(version: int, *rewards: float | None) -> Evaluation:
    runs = []
    for number, reward in enumerate(rewards):
        parts = {} if reward is None else {"queue": reward, "number": 0.0}
        call = NodeCall(
            call_id="c",
            node="n",
            model="desk",
            version=f"desk@{version}",
            messages=[],
            started_at="2026-01-01T00:00:00Z",
        )
        error = BROKEN if reward is None else None
        runs.append(GraphRun(run_id=str(number), reward=reward, reward_parts=parts, error=error, calls=[call]))
    return Evaluation.of([RunGroup(group_id=run.run_id, runs=[run]) for run in runs])


def test_scores() -> None:
    scores = Scores.of(evaluation(0, 1.0, 0.0, None).runs)
    assert scores == Scores(mean=0.5, std=0.5, parts={"queue": 0.5, "number": 0.0}, count=2, failed=1)
    assert Scores.of([]) == Scores(mean=0.0, std=0.0, parts={}, count=0, failed=0)


def test_the_table_compares_untrained_and_trained() -> None:
    console = Console(width=100)
    with console.capture() as captured:
        console.print(comparison_table(evaluation(0, 0.0, 0.5), evaluation(9, 1.0, 0.5, None)))
    rows = [[cell.strip() for cell in line.strip("│┃ ").split("│")] for line in captured.get().splitlines()]
    assert ["reward", "0.250", "0.750", "+0.500"] in rows
    assert ["queue", "0.250", "0.750", "+0.500"] in rows
    assert ["number", "0.000", "0.000", "+0.000"] in rows
    assert ["runs without a reward", "0", "1"] in rows
    assert "desk@0" in captured.get()
    assert "desk@9" in captured.get()


def test_the_table_names_the_measure_and_takes_further_rows() -> None:
    console = Console(width=100)
    further = {"valid answers": (0.25, 1.0)}
    table = comparison_table(evaluation(0, 0.0, 0.5), evaluation(9, 1.0, 0.5), measure="accuracy", also=further)
    with console.capture() as captured:
        console.print(table)
    rows = [[cell.strip() for cell in line.strip("│┃ ").split("│")] for line in captured.get().splitlines()]
    assert ["accuracy", "0.250", "0.750", "+0.500"] in rows
    assert ["valid answers", "0.250", "1.000", "+0.750"] in rows
    assert any(row[:3] == ["spread of accuracy", "0.250", "0.250"] for row in rows)
    assert "reward" not in captured.get()


@pytest.mark.parametrize("with_evaluations", [False, True])
def test_the_plot_is_a_png(tmp_path: Path, with_evaluations: bool) -> None:
    both = {"untrained": evaluation(0, 0.1), "trained": evaluation(2, 0.9)} if with_evaluations else {}
    path = tmp_path / "new" / "curve.png"
    plot_history(TrainHistory([step(1), step(2)]), path, title="desk", **both)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == ((1350 if with_evaluations else 1050), 600)


def test_an_empty_history_cannot_be_plotted(tmp_path: Path) -> None:
    with pytest.raises(ArtError, match="no steps to plot"):
        plot_history(TrainHistory(), tmp_path / "curve.png")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ArtError, match=r"pip install 'langgraph-art\[demo\]'"):
        plot_history(TrainHistory([step(1)]), tmp_path / "curve.png")


@pytest.mark.slow
def test_matplotlib_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, langgraph_art.trainer, langgraph_art.cli.main; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_summary_has_the_agreed_keys(tmp_path: Path) -> None:
    history = TrainHistory([step(1), step(2)])
    summary = summarize(history, seed=3, untrained=evaluation(0, 0.0), trained=evaluation(2, 1.0))
    assert summary == {
        "heldout_before": 0.0,
        "heldout_after": 1.0,
        "reward_before": 0.5,
        "reward_after": 0.5,
        "train_seconds": 11.0,
        "steps": 2,
        "seed": 3,
    }
    write_summary(tmp_path / "out" / "summary.json", summary)
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == summary
    assert summarize(TrainHistory(), seed=0)["reward_before"] is None


def test_a_history_survives_a_file(tmp_path: Path) -> None:
    history = TrainHistory([step(1), step(2)])
    history.save(tmp_path / "history.jsonl")
    assert TrainHistory.load(tmp_path / "history.jsonl") == history
