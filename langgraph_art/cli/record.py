"""``langgraph-art record``: run a Python program that knows nothing of recording, and record its graph runs.

Invariant: the program sees the arguments, the path and the exit that it would have without.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer


def record(
    program: Annotated[list[str], typer.Argument(help="A script, or with -m a module; then its own arguments.")],
    to: Annotated[Path, typer.Option("--to", help="File to which each graph run is appended.")] = Path("runs.jsonl"),
    swaps: Annotated[
        list[str] | None,
        typer.Option("--swap", metavar="KEY=POLICY", help="Let a policy answer at a node, or for a model; see swap()."),
    ] = None,
    fallback: Annotated[
        float | None,
        typer.Option("--fallback", help="Seconds to wait for a policy before the program's own model answers."),
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="The program is a module, as for python -m.")] = False,
) -> None:
    """Run a Python program and record every graph run in it, without a change to the program.

    Child processes that use langgraph-art record into the same file.
    """
    pairs = dict(_pair(swap) for swap in swaps or [])
    if fallback is not None and not pairs:
        raise typer.BadParameter("--fallback has no effect without --swap")
    from langgraph_art.instrument import VARIABLE, record_as_environment_says

    if pairs:
        from langgraph_art.swapping import swap_all

        swap_all(pairs, fallback=fallback)
    os.environ[VARIABLE] = str(to.absolute())
    record_as_environment_says()
    target, sys.argv[:] = program[0], program
    sys.path.insert(0, "" if module else str(Path(target).absolute().parent))
    try:
        if module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except Exception as error:
        traceback.print_exc()
        raise typer.Exit(1) from error


def _pair(swap: str) -> tuple[str, str]:
    key, _, policy = swap.rpartition("=")
    if not (key and policy):
        raise typer.BadParameter(f"--swap {swap}: write KEY=POLICY, such as gpt-4o=researcher")
    return key, policy
