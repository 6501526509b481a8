"""The optimizer steps of one update: one for each minibatch of whole groups, each minibatch once.

Invariant: ``old`` is the policy before the first step for all of them. With a single step it is the policy that
computes that step, so it needs no pass of its own and the ratio is exactly 1.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from langgraph_art.protocol import TrainConfig
from langgraph_art_server.training.model import PolicyModel
from langgraph_art_server.training.objective import reinforcement
from langgraph_art_server.training.optimizer import Optimizer
from langgraph_art_server.training.passes import accumulate_gradients, entry_logprobs
from langgraph_art_server.training.plan import Plan


def take_steps(
    model: PolicyModel,
    plan: Plan,
    config: TrainConfig,
    optimizer: Optimizer,
    on_pack: Callable[[], None],
    *,
    reference: list[Tensor] | None = None,
) -> dict[str, float]:
    """Takes the steps.

    Args:
        model: The model, with the parent's adapter.
        plan: The minibatches.
        config: The objective.
        optimizer: Of the adapter's weights.
        on_pack: Called after each pack, for each pass that it takes.
        reference: For each pack its logprobs under the version to stay close to.

    Returns:
        Metrics: of the loss and the gradient norm the mean over steps; of what is measured by token the mean over all
        tokens; of learning rate and step the last value.
    """
    old = entry_logprobs(model, plan.packs, on_pack) if config.minibatches > 1 else None
    losses, steps = [], []
    measures: dict[str, list[Tensor]] = {}
    first = 0
    for packs in plan.minibatches:
        own = slice(first, first + len(packs))
        first += len(packs)
        loss, measured = accumulate_gradients(
            model,
            packs,
            lambda sampled, entries: reinforcement(sampled, entries, config),
            on_pack,
            old=None if old is None else old[own],
            reference=None if reference is None else reference[own],
            entropy_gradient=bool(config.entropy),
        )
        losses.append(loss)
        steps.append(optimizer.step())
        for name, values in measured.items():
            measures.setdefault(name, []).append(values)
    return (
        {name: float(torch.cat(values).mean()) for name, values in measures.items()}
        | {"mismatch_max": float(torch.cat(measures["mismatch_mean"]).max()), "loss": statistics.fmean(losses)}
        | steps[-1]
        | {"grad_norm": statistics.fmean(step["grad_norm"] for step in steps)}
    )
