"""Corrections: what is done where the trainer gives the sampled tokens another probability than the sampler did.

The reasons are other kernels and precisions, and calls of an older version. With ``rho = exp(old - behaviour)`` of a
token, old being the trainer's logprob before the first step, each gives a constant factor on the entry's loss, limit C.
Invariant: factors carry no gradient, and are all 1 (a mask's: kept) where trainer and sampler agree. Masked tokens keep
their share in the mean. Sources: https://fengyao.notion.site/off-policy-rl, https://richardli.xyz/rl-collapse.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from langgraph_art_server.training.objective.entries import Entries


def token_truncation(log_rho: Tensor, entries: Entries, limit: float | None) -> tuple[Tensor, Tensor]:
    """``min(rho, C)``, C = 2 by default: truncated importance sampling."""
    rho, limit = log_rho.exp(), limit or 2.0
    return rho.clamp(max=limit), rho > limit


def token_mask(log_rho: Tensor, entries: Entries, limit: float | None) -> tuple[Tensor, Tensor]:
    """``rho`` where it is at most C, 2 by default, else 0: masked importance sampling."""
    return _masked(log_rho.exp(), limit or 2.0)


def sequence_mask(log_rho: Tensor, entries: Entries, limit: float | None) -> tuple[Tensor, Tensor]:
    """:func:`token_mask` with the ratio of the whole call, the product over its tokens."""
    return _masked(entries.call_sums(log_rho).exp(), limit or 2.0)


def geometric_mask(log_rho: Tensor, entries: Entries, limit: float | None) -> tuple[Tensor, Tensor]:
    """1 where the geometric mean of the call's ratios lies between 1/C and C, else 0. No ratio is multiplied.

    C is 1.01 by default. Long chains of thought are filtered at 1.001 (https://richardli.xyz/rl-collapse-3), but the
    mean over the few tokens of an agent's call varies more.
    """
    dropped = entries.call_means(log_rho).abs() > torch.tensor(limit or 1.01, dtype=log_rho.dtype).log()
    return (~dropped).to(log_rho.dtype), dropped


def _masked(rho: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    dropped = rho > limit
    return rho.masked_fill(dropped, 0.0), dropped


CORRECTIONS: dict[str, Callable[[Tensor, Entries, float | None], tuple[Tensor, Tensor]]] = {
    "token_truncation": token_truncation,
    "token_mask": token_mask,
    "sequence_mask": sequence_mask,
    "geometric_mask": geometric_mask,
}
"""By the values of ``TrainConfig.correction``. Each takes log rho [E], the entries and C, and returns the factors [E]
and, bool [E], where the limit acted."""
