"""What people see: plain lines in a log, a table with bars in a terminal, nothing when asked."""

from __future__ import annotations

import io
from datetime import UTC, datetime

import pytest
from rich.console import Console

from langgraph_art.history import StepLog
from langgraph_art.progress import TrainView, rollout_bar
from langgraph_art.protocol import Job
from langgraph_art.runs import GraphRun, RunError

BROKEN = RunError(type="TimeoutError", message="late", node=None, infrastructure=True)


def step(number: int) -> StepLog:
    return StepLog(
        step=number,
        reward_mean=0.5,
        reward_std=0.25,
        reward_parts={},
        runs=8,
        failed=1,
        tokens=1234,
        seconds={"rollout": 3.0, "reward": 0.01, "train": 2.0},
        total_seconds=5.5,
        versions={"desk": number, "scribe": 3},
        skipped={"group:no_signal": 2},
        metrics={},
    )


def job(done: int) -> Job:
    created = datetime(2026, 1, 1, tzinfo=UTC)
    return Job(id="j", idempotency_key="k", state="running", created_at=created, done=done, total=5)


def shown(*, terminal: bool, steps: int = 2) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=140)
    with TrainView(steps, console=console) as view:
        for number in range(1, steps + 1):
            on_run = view.rollout(2)
            on_run(GraphRun(run_id="a", reward=0.75), 1, 2)
            on_run(GraphRun(run_id="b", error=BROKEN), 2, 2)
            view.update(job(3))
            view.step(step(number))
    return console.file.getvalue()


def test_a_log_gets_one_plain_line_for_each_step() -> None:
    lines = shown(terminal=False).splitlines()
    assert lines == [
        f"step {n}  reward 0.500 ± 0.250  tokens 1234  seconds 5.5 (rollout 3.0, train 2.0)  "
        f"version desk@{n} scribe@3  skipped 2 group:no_signal"
        for n in (1, 2)
    ]


def test_a_terminal_gets_a_table_and_bars() -> None:
    text = shown(terminal=True)
    for part in ("0.500 ± 0.250", "desk@2 scribe@3", "steps", "runs", "reward 0.750, 1 failed", "update", "3/5", "2/2"):
        assert part in text


def test_a_job_that_is_not_serving_shows_why() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=140)
    with TrainView(1, console=console) as view:
        view.update(job(5).model_copy(update={"state": "trained", "error": "no memory [/for] it\nTraceback"}))
    assert "trained: no memory [/for] it" in console.file.getvalue()
    assert "Traceback" not in console.file.getvalue()


def test_a_long_training_still_fits_the_terminal() -> None:
    last_frame = shown(terminal=True, steps=40).rsplit("skipped", 1)[-1] + "skipped"
    assert "desk@40 " in last_frame
    assert "desk@20 " not in last_frame


def test_nothing_is_shown_when_not_wanted(capfd: pytest.CaptureFixture[str]) -> None:
    with TrainView(1, shown=False) as view:
        view.rollout(1)(GraphRun(run_id="a", reward=1.0), 1, 1)
        view.update(job(1))
        view.step(step(1))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_rollout_shows_mean_reward_and_failures(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with rollout_bar(3, console) as on_run:
        on_run(GraphRun(run_id="a", reward=1.0), 1, 3)
        on_run(GraphRun(run_id="b", reward=0.0), 2, 3)
        on_run(GraphRun(run_id="c", error=BROKEN), 3, 3)
    text = console.file.getvalue()
    assert "reward 0.500, 1 failed" in text
    assert ("3/3" in text) if terminal else text == "3 runs: reward 0.500, 1 failed\n"
