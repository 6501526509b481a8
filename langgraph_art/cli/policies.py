"""``langgraph-art policies``: list, show and create the policies of a server."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from langgraph_art.client import Client
from langgraph_art.protocol import LoraConfig, Policy

app = typer.Typer(no_args_is_help=True, help="List, show and create the policies of a server.")

_Url = Annotated[str | None, typer.Option(help="Root of the server; default: LANGGRAPH_ART_URL, else port 7373 here.")]
_Name = Annotated[str, typer.Argument(help="The policy's name.")]


@app.command("list", epilog="Example: langgraph-art policies list --url http://gpu-box:7373")
def list_policies(url: _Url = None) -> None:
    """List all policies."""
    with Client(url) as client:
        found = client.policies.list()
    table = Table("policy", "serves", "versions", "rank", "alpha", "layers")
    for policy in found:
        rank, alpha = str(policy.lora.rank), f"{policy.lora.alpha:g}"
        table.add_row(
            policy.name, f"{policy.name}@{policy.version}", str(len(policy.versions)), rank, alpha, _layers(policy)
        )
    Console().print(table)


@app.command("create", epilog="Example: langgraph-art policies create researcher --rank 16")
def create_policy(
    name: _Name,
    rank: Annotated[int, typer.Option(help="LoRA rank.")] = LoraConfig().rank,
    alpha: Annotated[float, typer.Option(help="LoRA scale; the update is multiplied by alpha / rank.")] = (
        LoraConfig().alpha
    ),
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="LAYER", help="Linear layer to adapt, such as q_proj; repeatable. Default: all."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the untrained adapter.")] = LoraConfig().seed,
    url: _Url = None,
) -> None:
    """Create a policy; nothing happens if it exists with the same shape."""
    with Client(url) as client:
        _show(client.policies.create(name, LoraConfig(rank=rank, alpha=alpha, targets=target or None, seed=seed)))


@app.command("show", epilog="Example: langgraph-art policies show researcher")
def show_policy(name: _Name, url: _Url = None) -> None:
    """Show one policy with all its versions."""
    with Client(url) as client:
        _show(client.policies.get(name))


def _show(policy: Policy) -> None:
    lora = policy.lora
    table = Table(
        "version",
        "parent",
        "trained by",
        "created",
        "loaded",
        title=f"{policy.name} (rank {lora.rank}, alpha {lora.alpha:g}, layers: {_layers(policy)})",
    )
    for version in policy.versions:
        table.add_row(
            f"{policy.name}@{version.version}" + (" (serves)" if version.version == policy.version else ""),
            "" if version.parent is None else f"{policy.name}@{version.parent}",
            version.job_id or "",
            f"{version.created_at:%Y-%m-%d %H:%M:%S}",
            "yes" if version.serving else "no",
        )
    Console().print(table)


def _layers(policy: Policy) -> str:
    return ", ".join(policy.lora.targets) if policy.lora.targets else "all"
