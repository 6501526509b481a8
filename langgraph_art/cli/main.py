"""The ``langgraph-art`` command: which subcommands there are, and how their errors look.

Invariant: whatever goes wrong is one clear line on standard error and exit code 1; ``--debug`` shows the traceback.
"""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Annotated, Any

import typer

from langgraph_art.cli import policies, runs
from langgraph_art.cli.doctor import doctor
from langgraph_art.cli.record import record
from langgraph_art.cli.serve import serve
from langgraph_art.cli.sft import sft


class _App(typer.Typer):
    debug = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except Exception as error:
            if self.debug:
                raise
            typer.echo(typer.style("error: ", fg="red", bold=True) + (str(error) or type(error).__name__), err=True)
            sys.exit(1)


app = _App(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train the agents of a LangGraph graph: serve a model, look at policies and recorded runs.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"langgraph-art {metadata.version('langgraph-art')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Options before the subcommand."""
    app.debug = debug


app.command(
    epilog="Example: langgraph-art serve --model Qwen/Qwen3-0.6B --policy desk -- --enable-prefix-caching",
)(serve)
app.command(epilog="Example: langgraph-art doctor --url http://gpu-box:7373")(doctor)
app.command(epilog="Example: langgraph-art sft desk out/runs/step-0001.jsonl --min-reward 0.9")(sft)
app.command(
    context_settings={"allow_interspersed_args": False},
    epilog="Example: langgraph-art record --to runs.jsonl -m langgraph_cli dev --no-reload",
)(record)
app.add_typer(policies.app, name="policies")
app.add_typer(runs.app, name="runs")
