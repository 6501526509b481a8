"""Trains the order desk on this machine and shows what that changed: ``python examples/order_desk/train.py``.

Starts a server of its own, measures the untrained policy on held-out tickets, trains, measures again. Leaves the reward
curve, ``summary.json``, every run and the trained adapter in the output directory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

# Run as a script, from any directory.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.order_desk.data import LabelledTicket, load_tickets
from examples.order_desk.graph import QUEUES, Ticket, graph
from examples.order_desk.reward import Scorer
from langgraph_art import EmbeddedServer, TrainConfig, Trainer
from langgraph_art.errors import ArtError
from langgraph_art.history import Evaluation
from langgraph_art.report import comparison_table, plot_history, summarize, write_summary

RUNS_PER_INPUT = 8
INPUTS_PER_STEP = 16
# Undivided advantages: partial credit stays the small hint that it is meant to be.
TRAINING = TrainConfig(learning_rate=2e-4, scale="none")
EXAMPLES_SHOWN = 8


def main(
    steps: Annotated[int, typer.Option(envvar="STEPS", help="Updates to make.")] = 18,
    seed: Annotated[int, typer.Option(envvar="SEED", help="Seed of the adapter and of the order of tickets.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Output directory. Default: runs/order_desk/seed-<seed>; an older one there gets another name."
        ),
    ] = None,
) -> None:
    """Train the order desk and compare it with the untrained one on held-out tickets."""
    console = Console()
    if out is None:
        out = Path("runs/order_desk") / f"seed-{seed}"
        if out.exists():
            older = out.with_name(f"{out.name}-until-{datetime.now():%Y%m%d-%H%M%S}")
            out.rename(older)
            console.print(f"The results of an earlier run are now in {older}.")
    elif out.exists() and any(out.iterdir()):
        raise typer.BadParameter(f"{out} is not empty; the demo would mix with what is there", param_hint="--out")
    train, heldout = load_tickets("train"), load_tickets("heldout")
    scorer = Scorer(train + heldout)

    with Trainer(
        graph,
        inputs(train),
        scorer.reward,
        policies=["desk"],
        server=server(out / "server"),
        runs_per_input=RUNS_PER_INPUT,
        inputs_per_step=INPUTS_PER_STEP,
        config=TRAINING,
        concurrency=64,
        seed=seed,
        out_dir=out,
    ) as trainer:
        console.print("[bold]Held-out tickets, untrained policy")
        untrained = trainer.evaluate(inputs(heldout), reward=scorer.strict)
        console.print("[bold]Training")
        history = trainer.fit(steps)
        console.print("[bold]Held-out tickets, trained policy")
        trained = trainer.evaluate(inputs(heldout), reward=scorer.strict)

    plot_history(history, out / "reward.png", untrained=untrained, trained=trained, title="Order desk")
    write_summary(out / "summary.json", summarize(history, seed=seed, untrained=untrained, trained=trained))
    console.print(answers_table(heldout, untrained, trained))
    also = {f"  {queue}": (solved(untrained, queue, scorer), solved(trained, queue, scorer)) for queue in QUEUES}
    also["training reward of the same answers"] = (reward_of(untrained, scorer), reward_of(trained, scorer))
    title = f"{len(heldout)} held-out tickets, temperature 0"
    console.print(comparison_table(untrained, trained, title=title, measure="solved exactly", also=also))
    first, last = history.steps[0], history.steps[-1]
    console.print(f"Training reward: {first.reward_mean:.3f} in the first step, {last.reward_mean:.3f} in the last.")
    console.print(
        f"Trained for {history.train_seconds:.0f} s. Curve: {out / 'reward.png'}, numbers: {out / 'summary.json'}."
    )


def server(data_dir: Path) -> EmbeddedServer:
    """A server for the demo's small model, which is started by the trainer that gets it."""
    return EmbeddedServer("smollm2-135m-instruct", data_dir=data_dir, max_model_len=512)


def inputs(tickets: Iterable[LabelledTicket]) -> list[Ticket]:
    """What the graph gets to see of a ticket: the message."""
    return [Ticket(message=ticket["message"]) for ticket in tickets]


def solved(evaluation: Evaluation, queue: str, scorer: Scorer) -> float:
    """Share of the tickets of one queue that were solved exactly."""
    return mean(scorer.strict(run) for run in evaluation.runs if scorer.ticket(run)["queue"] == queue)


def reward_of(evaluation: Evaluation, scorer: Scorer) -> float:
    """Mean training reward of runs that were scored by another measure."""
    return mean(sum(scorer.reward(run).values()) for run in evaluation.runs)


def answers_table(tickets: list[LabelledTicket], untrained: Evaluation, trained: Evaluation) -> Table:
    """What the policies really said to some tickets."""
    table = Table(title="What the policy says", show_lines=True)
    for column in ("message", "right", "untrained", "trained"):
        table.add_column(column, overflow="fold")
    for ticket, before, after in list(zip(tickets, untrained.runs, trained.runs, strict=True))[:EXAMPLES_SHOWN]:
        right = " ".join(filter(None, (ticket["queue"], ticket["order"])))
        said = [
            " → ".join(repr(run.output[key]) for key in ("queue", "order") if run.output and key in run.output)
            for run in (before, after)
        ]
        table.add_row(ticket["message"], right, *said)
    return table


if __name__ == "__main__":
    try:
        typer.run(main)
    except ArtError as error:
        sys.exit(f"error: {error}")
