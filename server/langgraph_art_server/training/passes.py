"""Packs through the model: forward only, for logprobs to compare with, or forward and backward, for gradients.

Invariant: one pack is in memory at a time, and what it leaves behind is E numbers for each measure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from langgraph_art_server.training.head import Sampled, read_sampled
from langgraph_art_server.training.model import PolicyModel
from langgraph_art_server.training.objective import Loss
from langgraph_art_server.training.objective.entries import Entries
from langgraph_art_server.training.tree import Pack


def entry_logprobs(model: PolicyModel, packs: Sequence[Pack], on_pack: Callable[[], None]) -> list[Tensor]:
    """Computes each pack's logprobs [E] (float64, on the CPU) under the model as it is, without gradients."""
    logprobs = []
    with torch.no_grad():
        for pack in packs:
            placed = pack.to(model.device)
            logprobs.append(read_sampled(model.hidden(placed), model.head, placed).logprobs.cpu())
            on_pack()
    return logprobs


def accumulate_gradients(
    model: PolicyModel,
    packs: Sequence[Pack],
    objective: Callable[[Sampled, Entries], Loss],
    on_pack: Callable[[], None],
    *,
    old: Sequence[Tensor] | None = None,
    reference: Sequence[Tensor] | None = None,
    entropy_gradient: bool = False,
) -> tuple[float, dict[str, Tensor]]:
    """Adds the gradients of a minibatch's loss to those of the adapter.

    Args:
        model: The model, with the adapter to train.
        packs: The minibatch.
        objective: The loss of one pack.
        on_pack: Called after each pack.
        old: For each pack its logprobs before the first step; ``None`` if that is now.
        reference: For each pack its logprobs under the reference.
        entropy_gradient: Whether the objective's loss depends on the entropies.

    Returns:
        The loss, and each measure of the objective for all entries (float64, on the CPU), packs in order.
    """
    total = 0.0
    measures: dict[str, list[Tensor]] = {}
    for index, pack in enumerate(packs):
        placed = pack.to(model.device)
        sampled = read_sampled(model.hidden(placed), model.head, placed, entropy_gradient=entropy_gradient)
        entries = Entries.of(
            placed,
            old=None if old is None else old[index],
            reference=None if reference is None else reference[index],
        )
        result = objective(sampled, entries)
        result.loss.backward()
        total += float(result.loss.detach())
        for name, values in result.measures.items():
            measures.setdefault(name, []).append(values.cpu())
        on_pack()
    return total, {name: torch.cat(values) for name, values in measures.items()}
