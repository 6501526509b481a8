"""What a person sees while rollouts and training run: live bars and a table, or plain lines where nobody watches.

Invariant: a view only shows; nothing depends on it. In a terminal or notebook it is live; elsewhere (a log file, CI)
each rollout and each step is one line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from langgraph_art.history import StepLog
from langgraph_art.protocol import Job
from langgraph_art.runs import GraphRun

_ROWS = 15  # steps that the live table shows; a taller one would not fit a terminal


def _is_live(console: Console) -> bool:
    return console.is_terminal or console.is_jupyter


def _bars(console: Console) -> Progress:
    columns = TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, TextColumn("{task.fields[note]}"), console=console)


class _Tally:
    """Runs so far: how many failed, and the mean reward of the others."""

    def __init__(self) -> None:
        self._rewards: list[float] = []
        self._failed = 0

    def add(self, run: GraphRun) -> None:
        if run.error is not None and run.error.infrastructure:
            self._failed += 1
        if run.reward is not None:
            self._rewards.append(run.reward)

    def __str__(self) -> str:
        mean = f"reward {math.fsum(self._rewards) / len(self._rewards):.3f}" if self._rewards else ""
        failed = f"{self._failed} failed" if self._failed else ""
        return ", ".join(filter(None, (mean, failed)))


@contextmanager
def rollout_bar(total: int, console: Console | None = None) -> Iterator[Callable[[GraphRun, int, int], None]]:
    """Show a bar over ``total`` runs; the block gets the function to call after each run."""
    console = console or Console(stderr=True)
    tally = _Tally()
    if not _is_live(console):
        yield lambda run, done, total: tally.add(run)
        console.print(f"{total} runs: {tally}")
        return
    with _bars(console) as bars:
        bar = bars.add_task("runs", total=total, note="")

        def report(run: GraphRun, done: int, total: int) -> None:
            tally.add(run)
            bars.update(bar, completed=done, note=str(tally))

        yield report


class TrainView:
    """The view of a training: a row for each step, and bars for the rollouts and the update of the current one.

    Args:
        steps: number of steps to come.
        shown: False shows nothing.
        console: default: standard error.
    """

    def __init__(self, steps: int, *, shown: bool = True, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, quiet=not shown)
        self._live = shown and _is_live(self._console)
        self._logs: list[StepLog] = []
        self._bars = _bars(self._console)
        self._step_bar = self._bars.add_task("steps", total=steps, note="")
        self._run_bar = self._bars.add_task("runs", total=None, note="")
        self._pack_bar = self._bars.add_task("update", total=None, note="")
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if self._live:
            self._stack.enter_context(Live(get_renderable=self._render, console=self._console, refresh_per_second=4))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def rollout(self, total: int) -> Callable[[GraphRun, int, int], None]:
        """A step's rollout begins; returns the function to call after each of its runs."""
        tally = _Tally()
        self._bars.reset(self._run_bar, total=total, note="")
        self._bars.reset(self._pack_bar, total=None, start=False, note="")

        def report(run: GraphRun, done: int, total: int) -> None:
            tally.add(run)
            self._bars.update(self._run_bar, completed=done, note=str(tally))
            if done == total:
                self._bars.stop_task(self._run_bar)

        return report

    def update(self, job: Job) -> None:
        """The server reports on the update."""
        # A trained job with an error waits to be served; the reason may hold brackets, which rich would read as markup.
        reason = f": {escape(job.error.splitlines()[0][:60])}" if job.error else ""
        self._bars.start_task(self._pack_bar)
        self._bars.update(self._pack_bar, completed=job.done, total=job.total or None, note=f"{job.state}{reason}")

    def step(self, log: StepLog) -> None:
        """A step is done."""
        self._logs.append(log)
        self._bars.advance(self._step_bar)
        if not self._live:
            line = "  ".join(f"{name} {cell}" for name, cell in _cells(log).items() if cell)
            self._console.print(line, soft_wrap=True, highlight=False)

    def _render(self) -> RenderableType:
        table = Table(box=None, pad_edge=False)
        for name in _cells(self._logs[-1]) if self._logs else ():
            table.add_column(name, justify="right", no_wrap=True)
        for log in self._logs[-_ROWS:]:
            table.add_row(*_cells(log).values())
        return Group(table, self._bars)


def _cells(log: StepLog) -> dict[str, str]:
    """What is shown of a step, by column."""
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in log.seconds.items() if seconds >= 0.05)
    return {
        "step": str(log.step),
        "reward": f"{log.reward_mean:.3f} ± {log.reward_std:.3f}",
        "tokens": str(log.tokens),
        "seconds": f"{log.total_seconds:.1f} ({phases})" if phases else f"{log.total_seconds:.1f}",
        "version": " ".join(f"{name}@{version}" for name, version in log.versions.items()),
        "skipped": ", ".join(f"{count} {reason}" for reason, count in sorted(log.skipped.items())),
    }
