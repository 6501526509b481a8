"""``langgraph-art runs``: look at saved graph runs, all of a file or one as a tree of nodes and calls; delete a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from langchain_core.messages import BaseMessage
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from langgraph_art.client import Client
from langgraph_art.errors import ArtError
from langgraph_art.history import Scores, sampled_tokens
from langgraph_art.runs import GraphRun, NodeCall, RunError, RunInterrupt, as_record, load_runs, remove_run

app = typer.Typer(no_args_is_help=True, help="Look at saved graph runs, delete a run.")

_File = Annotated[Path, typer.Argument(help="A file that save_runs or a Trainer with out_dir= wrote.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")]


@app.command("list", epilog="Example: langgraph-art runs list out/runs/step-0001.jsonl")
def list_runs(path: _File, as_json: _Json = False) -> None:
    """List the runs of a file, group by group."""
    runs = sorted(_load(path), key=lambda run: run.group_id or "")
    if as_json:
        typer.echo(json.dumps([_summary(run) for run in runs], indent=2))
        return
    table = Table("run", "group", "reward", "seconds", "calls", "tokens", "versions", "interrupts", "error")
    for run in runs:
        facts = _summary(run)
        table.add_row(
            run.run_id,
            (run.group_id or "")[:8],
            "" if run.reward is None else f"{run.reward:.3f}",
            f"{run.seconds:.1f}",
            str(facts["calls"]),
            str(facts["tokens"]),
            " ".join(facts["versions"]),
            str(facts["interrupts"] or ""),
            Text(facts["error"] or ""),
        )
    console = Console()
    console.print(table)
    scores = Scores.of(runs)
    failed = f", {scores.failed} failed" if scores.failed else ""
    console.print(f"{len(runs)} runs{failed}, reward {scores.mean:.3f} ± {scores.std:.3f} over {scores.count}")


@app.command("show", epilog="Example: langgraph-art runs show out/runs/step-0001.jsonl 3f2a")
def show_run(
    path: _File, run: Annotated[str, typer.Argument(help="The run's id, or its beginning.")], as_json: _Json = False
) -> None:
    """Show one run: what went in and came out, and the tree of its nodes with their calls, interrupts and errors."""
    found = [candidate for candidate in _load(path) if candidate.run_id.startswith(run)]
    if len(found) != 1:
        raise ArtError(
            f"{len(found)} runs in {path} begin with {run!r}; `langgraph-art runs list {path}` names them all."
        )
    if as_json:
        typer.echo(json.dumps(as_record(found[0]), indent=2))
        return
    console = Console()
    console.print(_heads(found[0]))
    console.print(_tree(found[0]))
    console.print(Text.assemble(("output  ", "bold"), _text(found[0].output)))


@app.command("delete", epilog="Example: langgraph-art runs delete 3f2a77c0-5d1e --file out/runs/step-0001.jsonl")
def delete_run(
    run_id: Annotated[str, typer.Argument(help="The run's whole id.")],
    file: Annotated[
        list[Path] | None, typer.Option(help="A file to take the run out of as well; may be given again.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Root of the server; default: LANGGRAPH_ART_URL, else port 7373 here.")
    ] = None,
) -> None:
    """Delete a run from the server and from files. What a policy learned from it stays in its weights."""
    for path in file or []:
        _require(path)
    with Client(url) as client:
        deleted = client.delete_run(run_id)
    typer.echo(f"server: {deleted.calls} recorded calls, {deleted.pins} pins, its part of {deleted.jobs} jobs deleted")
    for path in file or []:
        typer.echo(f"{path}: {remove_run(path, run_id)} runs deleted")
    if deleted.trained_into:
        typer.echo(f"still in the weights of {', '.join(deleted.trained_into)} and of what was trained from them")


# -- one run ----------------------------------------------------------------------------------------------------------


def _summary(run: GraphRun) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "group_id": run.group_id,
        "reward": run.reward,
        "seconds": run.seconds,
        "calls": len(run.calls),
        "tokens": sampled_tokens([run]),
        "versions": sorted({call.version for call in run.calls if call.version}),
        "interrupts": len(run.interrupts),
        "error": None if run.error is None else _error(run.error),
    }


def _heads(run: GraphRun) -> Table:
    parts = ", ".join(f"{name} {value:.3f}" for name, value in run.reward_parts.items())
    rows = {
        "run": run.run_id,
        "group": run.group_id or "",
        "started": f"{run.started_at:%Y-%m-%d %H:%M:%S} UTC, {run.seconds:.1f} s",
        "reward": "" if run.reward is None else f"{run.reward:.3f}" + (f" ({parts})" if parts else ""),
        "error": "" if run.error is None else _error(run.error),
        "metadata": _text(run.metadata) if run.metadata else "",
        "input": _text(run.input),
    }
    heads = Table.grid("name", "value", padding=(0, 2))
    for name, value in rows.items():
        if value:
            heads.add_row(Text(name, "bold"), Text(value))
    return heads


def _tree(run: GraphRun) -> Tree:
    """Nodes by their path, and in each its calls, numbered in the order in which they began, interrupts and errors."""
    root = Tree(Text("calls by node", "bold"))
    branches: dict[str, Tree] = {}

    def branch(path: str) -> Tree:
        if path not in branches:
            parent, _, name = path.rpartition("|")
            label = Text(name or "(outside any node)", "bold")
            if path in run.node_rewards:
                label.append(f"  reward {run.node_rewards[path]:.3f}", "green")
            branches[path] = (branch(parent) if parent else root).add(label)
        return branches[path]

    for path in run.nodes:
        branch(path)
    shown: set[int] = set()
    numbers = {id(call): number for number, call in enumerate(run.calls, 1)}
    for path in run.nodes:
        for call in run.calls:
            if call.node == path:
                _add_call(branch(path), call, numbers[id(call)], shown)
    for interrupt in run.interrupts:
        branch(interrupt.node).add(_interrupt(interrupt))
    if run.error is not None and run.error not in [call.error for call in run.calls]:
        (branch(run.error.node) if run.error.node else root).add(Text(_error(run.error), "red"))
    return root


def _add_call(node: Tree, call: NodeCall, number: int, shown: set[int]) -> None:
    """Add a call with the messages that no call above has shown yet."""
    usage = call.usage or {}
    tokens = f"{usage.get('input_tokens', '?')} + {usage.get('output_tokens', '?')} tokens"
    facts = [f"call {number}", call.version or call.model, tokens, call.finish_reason or ""]
    facts += ["" if call.delivered else "not delivered", "" if call.art else "not by ChatART"]
    branch = node.add(Text(" · ".join(filter(None, facts)), "dim"))
    repeated = sum(id(message) in shown for message in call.messages)
    if repeated:
        branch.add(Text(f"{repeated} messages shown above", "dim"))
    for message in [*call.messages, *([call.response] if call.response else [])]:
        if id(message) in shown:
            continue
        shown.add(id(message))
        line = Text(f"{message.get('type', '?')}: ", "bold")
        line.append(_text(message.get("content")), "")
        for tool_call in message.get("tool_calls") or []:
            line.append(f"\n→ {tool_call.get('name')}({_text(tool_call.get('args'))})", "cyan")
        for tool_call in message.get("invalid_tool_calls") or []:
            line.append(f"\n→ {tool_call.get('name')}({_text(tool_call.get('args'))}), which is invalid", "red")
        branch.add(line)
    if call.error is not None:
        branch.add(Text(_error(call.error), "red"))


def _interrupt(interrupt: RunInterrupt) -> Text:
    answer = f"answered {_text(interrupt.answer)}" if interrupt.answered else "not answered"
    return Text.assemble(("interrupt: ", "bold yellow"), f"{_text(interrupt.value)} · {answer}")


def _error(error: RunError) -> str:
    return f"{error.type}{f' in {error.node}' if error.node else ''}: {error.message}"


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
    """The runs of a file; of one that was resumed and so is there again, the last."""
    _require(path)
    return list({run.run_id: run for run in load_runs(path)}.values())


def _require(path: Path) -> None:
    if not path.is_file():
        raise ArtError(f"There is no file {path}.")
