"""Seconds and tokens per second of each phase of a training step of the demo: rollout, reward, update, swap.

    python benchmarks/demo_step.py [--steps 3]

Runs the order desk against a server of its own and reports medians over steps, the first one left out (it starts the
trainer and fills the caches).
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import describe
from examples.order_desk.data import load_tickets
from examples.order_desk.graph import graph
from examples.order_desk.reward import Scorer
from examples.order_desk.train import INPUTS_PER_STEP, RUNS_PER_INPUT, TRAINING, inputs, server
from langgraph_art import Trainer, load_runs

PHASES = ("rollout", "reward", "queue", "join", "train", "load")


def main(steps: Annotated[int, typer.Option(help="Steps to measure, after one that is not.")] = 3) -> None:
    """Measure the phases of a demo step."""
    tickets = load_tickets("train")
    with (
        tempfile.TemporaryDirectory() as directory,
        Trainer(
            graph,
            inputs(tickets),
            Scorer(tickets).reward,
            policies=["desk"],
            server=server(Path(directory) / "server"),
            runs_per_input=RUNS_PER_INPUT,
            inputs_per_step=INPUTS_PER_STEP,
            config=TRAINING,
            concurrency=64,
            out_dir=Path(directory) / "out",
        ) as trainer,
    ):
        history = trainer.fit(steps + 1).steps[1:]
        runs = [load_runs(Path(directory) / "out" / "runs" / f"step-{log.step:04}.jsonl") for log in history]
    calls = [sum(len(run.calls) for run in step) for step in runs]
    prompt = [sum(call.usage["input_tokens"] for run in step for call in run.calls if call.usage) for step in runs]
    seconds = {phase: statistics.median(log.seconds.get(phase, 0.0) for log in history) for phase in PHASES}
    computed = [log.metrics["desk"]["computed_tokens"] for log in history]
    print(
        json.dumps(
            {
                "machine": describe(),
                "steps": steps,
                "seconds": {phase: round(value, 3) for phase, value in seconds.items()},
                "step_seconds": round(statistics.median(log.total_seconds for log in history), 3),
                "calls": statistics.median(calls),
                "prompt_tokens": statistics.median(prompt),
                "sampled_tokens": statistics.median(log.tokens for log in history),
                "rollout_calls_per_second": _rate(calls, [log.seconds["rollout"] for log in history]),
                "rollout_sampled_tokens_per_second": _rate(
                    [log.tokens for log in history], [log.seconds["rollout"] for log in history]
                ),
                "update_computed_tokens_per_second": _rate(computed, [log.seconds["train"] for log in history]),
            }
        )
    )


def _rate(amounts: Sequence[float], seconds: Sequence[float]) -> float:
    return round(statistics.median(amount / time for amount, time in zip(amounts, seconds, strict=True)), 2)


if __name__ == "__main__":
    typer.run(main)
