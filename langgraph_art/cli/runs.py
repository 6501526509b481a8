"""``langgraph-art runs``: look at saved graph runs, all of a file or one with its calls by node."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from langchain_core.messages import BaseMessage
from rich.console import Console
from rich.table import Table
from rich.text import Text

from langgraph_art.errors import ArtError
from langgraph_art.history import Scores, sampled_tokens
from langgraph_art.runs import GraphRun, NodeCall, load_runs

app = typer.Typer(no_args_is_help=True, help="Look at saved graph runs.")

_File = Annotated[Path, typer.Argument(help="A file that save_runs or a Trainer with out_dir= wrote.")]


@app.command("list", epilog="Example: langgraph-art runs list out/runs/step-0001.jsonl")
def list_runs(path: _File) -> None:
    """List the runs of a file, group by group."""
    runs = _load(path)
    table = Table("run", "group", "reward", "seconds", "calls", "tokens", "versions", "error")
    for run in sorted(runs, key=lambda run: run.group_id or ""):
        versions = sorted({call.version for call in run.calls if call.version})
        table.add_row(
            run.run_id,
            (run.group_id or "")[:8],
            "" if run.reward is None else f"{run.reward:.3f}",
            f"{run.seconds:.1f}",
            str(len(run.calls)),
            str(sampled_tokens([run])),
            " ".join(versions),
            _error(run),
        )
    console = Console()
    console.print(table)
    scores = Scores.of(runs)
    failed = f", {scores.failed} failed" if scores.failed else ""
    console.print(f"{len(runs)} runs{failed}, reward {scores.mean:.3f} ± {scores.std:.3f} over {scores.count}")


@app.command("show", epilog="Example: langgraph-art runs show out/runs/step-0001.jsonl 3f2a")
def show_run(path: _File, run: Annotated[str, typer.Argument(help="The run's id, or its beginning.")]) -> None:
    """Show one run: input, calls by node, output, reward."""
    found = [candidate for candidate in _load(path) if candidate.run_id.startswith(run)]
    if len(found) != 1:
        raise ArtError(
            f"{len(found)} runs in {path} begin with {run!r}; `langgraph-art runs list {path}` names them all."
        )
    shown = found[0]
    console = Console()
    heads = Table.grid("name", "value", padding=(0, 2))
    parts = ", ".join(f"{name} {value:.3f}" for name, value in shown.reward_parts.items())
    rows = {
        "run": shown.run_id,
        "group": shown.group_id or "",
        "started": f"{shown.started_at:%Y-%m-%d %H:%M:%S} UTC, {shown.seconds:.1f} s",
        "reward": "" if shown.reward is None else f"{shown.reward:.3f}" + (f" ({parts})" if parts else ""),
        "error": _error(shown),
        "input": _text(shown.input),
    }
    for name, value in rows.items():
        if value:
            heads.add_row(Text(name, "bold"), Text(value))
    console.print(heads)
    for node in shown.nodes:
        console.rule(Text(node or "(outside any node)"), align="left")
        for call in shown.calls:
            if call.node == node:
                _print_call(console, call)
    console.rule("output", align="left")
    console.print(Text(_text(shown.output)))


def _print_call(console: Console, call: NodeCall) -> None:
    usage = call.usage or {}
    tokens = f"{usage.get('input_tokens', '?')} + {usage.get('output_tokens', '?')} tokens"
    facts: Sequence[str] = [call.version or call.model, tokens, call.finish_reason or ""]
    facts = [*facts, "" if call.delivered else "not delivered", "" if call.art else "not by ChatART"]
    console.print(Text(" · ".join(filter(None, facts)), "dim"))
    for message in [*call.messages, *([call.response] if call.response else [])]:
        line = Text(f"{message.get('type', '?')}: ", "bold")
        line.append(_text(message.get("content")), "")
        for tool_call in message.get("tool_calls") or []:
            line.append(f"\n  → {tool_call.get('name')}({_text(tool_call.get('args'))})", "cyan")
        console.print(line)
    if call.error is not None:
        console.print(Text(f"{call.error.type}: {call.error.message}", "red"))


def _error(run: GraphRun) -> str:
    if run.error is None:
        return ""
    return f"{run.error.type}{f' in {run.error.node}' if run.error.node else ''}: {run.error.message}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(_readable(value), ensure_ascii=False, default=str)


def _readable(value: Any) -> Any:
    """The value for people: messages as their text, keys as strings."""
    if isinstance(value, BaseMessage):
        return f"{value.type}: {value.text}"
    if isinstance(value, dict):
        return {str(key): _readable(item) for key, item in value.items()}
    return [_readable(item) for item in value] if isinstance(value, list | tuple) else value


def _load(path: Path) -> list[GraphRun]:
    if not path.is_file():
        raise ArtError(f"There is no file {path}.")
    return load_runs(path)
