"""``langgraph-art sft``: fine-tune a policy on recorded runs or conversations from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from langgraph_art.client import Client
from langgraph_art.errors import ArtError
from langgraph_art.protocol import Job, SftConfig, TrainResult
from langgraph_art.warm_up import load_examples

_DEFAULT = SftConfig()


def sft(
    policy: Annotated[str, typer.Argument(help="The policy's name; it must exist.")],
    path: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Runs of save_runs, or conversations in OpenAI's chat format (JSONL)."),
    ],
    min_reward: Annotated[float | None, typer.Option(help="Of runs, only those with at least this reward.")] = None,
    node: Annotated[
        list[str] | None,
        typer.Option(help="Learn the calls at this node, whatever model made them; repeatable. Default: the policy's."),
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="AdamW step size.")] = _DEFAULT.learning_rate,
    epochs: Annotated[int, typer.Option(help="How often each example is seen.")] = _DEFAULT.epochs,
    batch_size: Annotated[int, typer.Option(help="Examples in each step.")] = _DEFAULT.batch_size,
    schedule: Annotated[Literal["constant", "linear", "cosine"], typer.Option(help="Of the learning rate.")] = (
        _DEFAULT.schedule
    ),
    warmup_steps: Annotated[int, typer.Option(help="Steps in which the learning rate rises.")] = _DEFAULT.warmup_steps,
    seed: Annotated[int, typer.Option(help="Seed of the order of the examples.")] = _DEFAULT.seed,
    key: Annotated[
        str | None, typer.Option(help="Idempotency key; the same examples are learned once unless it differs.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Root of the server; default: LANGGRAPH_ART_URL, else port 7373 here.")
    ] = None,
) -> None:
    """Fine-tune a policy on good answers, and wait until the new version serves."""
    examples = load_examples(path, min_reward=min_reward)
    try:
        config = SftConfig(
            learning_rate=learning_rate,
            epochs=epochs,
            batch_size=batch_size,
            schedule=schedule,
            warmup_steps=warmup_steps,
            seed=seed,
        )
    except ValidationError as error:
        wrong = (f"--{'.'.join(map(str, e['loc'])).replace('_', '-')}: {e['msg']}" for e in error.errors())
        raise ArtError("; ".join(wrong)) from error
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Client(url) as client, Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        bar = bars.add_task("queued", total=None)

        def show(job: Job) -> None:
            bars.update(bar, description=job.state, total=job.total or None, completed=job.done)

        result = client.sft(policy, examples, config=config, nodes=node or None, idempotency_key=key, on_progress=show)
    _print(result)


def _print(result: TrainResult) -> None:
    console = Console()
    for update in result.updates:
        console.print(
            f"{update.policy}@{update.version}: {update.calls} answers, {update.trained_tokens} tokens, "
            f"{len(update.losses)} steps, loss {update.losses[0]:.3f} → {update.losses[-1]:.3f} per token"
        )
    for reason, count in sorted(result.skipped.items()):
        console.print(f"left out: {count} {reason}")
