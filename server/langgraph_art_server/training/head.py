"""The output head: logprob and entropy of every sampled token, differentiable, without ever keeping logits.

Invariant: logits exist for one chunk of rows at a time, in float32 or wider. The forward pass already takes the two
products with the output embedding W that any gradient needs, logits and expected embedding, so nothing is computed
again whatever the objective is. With p = softmax(h W^T / T) of one row and H its entropy,

    d logp(t) / dh = (W_t - sum_v p_v W_v) / T            dH / dh = - sum_v p_v (log p_v + H) W_v / T
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from langgraph_art_server.training.tree import Pack

CHUNK_ROWS = 128
"""Rows of logits that exist at once: 128 rows of a vocabulary of 49,152 are 25 MB in float32."""


@dataclass(frozen=True)
class Sampled:
    """What the model says about the sampled tokens of a pack, one value for each of its E entries."""

    logprobs: Tensor
    """float64 [E], nats, at the entry's temperature."""
    entropies: Tensor
    """float64 [E], nats: of the distribution that the entry's token was drawn from."""


def read_sampled(
    hidden: Tensor, head: nn.Linear, pack: Pack, *, entropy_gradient: bool = False, chunk_rows: int = CHUNK_ROWS
) -> Sampled:
    """Reads the sampled tokens' logprobs and entropies off the model's last hidden states.

    Args:
        hidden: [N, hidden], after the final norm. If it needs no gradient, only the logits are computed.
        head: The output embedding, a linear layer ``hidden -> vocabulary``. Gets no gradient.
        pack: The pack, on the device of ``hidden``.
        entropy_gradient: Whether the entropies are differentiable too, which costs a third product.
        chunk_rows: Rows of logits at a time.
    """
    gradient = hidden.requires_grad and torch.is_grad_enabled()
    logprobs, entropies = _Head.apply(hidden, head, pack, gradient, gradient and entropy_gradient, chunk_rows)  # type: ignore[no-untyped-call]
    return Sampled(
        logprobs=logprobs.double()[pack.entry_targets],
        entropies=entropies.double()[pack.target_rows[pack.entry_targets]],
    )


class _Head(torch.autograd.Function):
    """Logprobs [S] of the targets and entropies [R] of the rows."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: nn.Linear, pack: Pack, gradient: bool, entropy_gradient: bool, chunk_rows: int
    ) -> tuple[Tensor, Tensor]:
        rows = hidden[pack.row_nodes]
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        scaled = bool((pack.row_temperatures != 1).any())
        starts = range(0, len(rows), chunk_rows)
        bounds = torch.searchsorted(pack.target_rows, torch.tensor([*starts, len(rows)], device=rows.device)).tolist()
        logprobs = torch.empty(len(pack.target_rows), dtype=dtype, device=rows.device)
        entropies = torch.empty(len(rows), dtype=dtype, device=rows.device)
        others = torch.empty_like(rows, dtype=dtype) if gradient else None
        slopes = torch.empty_like(rows, dtype=dtype) if entropy_gradient else None
        for start, first, last in zip(starts, bounds, bounds[1:], strict=False):
            chunk = slice(start, start + chunk_rows)
            at = (pack.target_rows[first:last] - start, pack.target_tokens[first:last])
            logits = _product(rows[chunk], head.weight.T, dtype)
            if head.bias is not None:
                logits += head.bias
            if scaled:
                logits /= pack.row_temperatures[chunk, None].to(dtype)
            # Each pass over the logits counts, so p stays without its normaliser: p / total is the probability.
            logits -= logits.amax(-1, keepdim=True)
            p = logits.exp()
            total = p.sum(-1, keepdim=True)
            log_total = total.log()
            logprobs[first:last] = logits[at] - log_total[at[0], 0]
            entropies[chunk] = log_total[:, 0] - torch.linalg.vecdot(p, logits) / total[:, 0]
            if slopes is not None:
                weights = logits.add_(entropies[chunk, None] - log_total).mul_(p)
                slopes[chunk] = _product(weights.to(rows.dtype), head.weight, dtype) / total
            if others is not None:
                # Without the targets, whose part backward adds from their float32 logprobs: where p of the sampled
                # token is near 1, W_t - sum p W would cancel to the rounding error of a 16-bit product.
                p[at] = 0
                others[chunk] = _product(p.to(rows.dtype), head.weight, dtype) / total
        ctx.pack, ctx.head, ctx.shape, ctx.dtype = pack, head, hidden.shape, hidden.dtype
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logprobs, others, slopes)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, by_logprobs: Tensor | None, by_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        logprobs, others, slopes = ctx.saved_tensors
        pack = ctx.pack
        gradient = torch.zeros_like(others)
        if by_logprobs is not None:
            totals = gradient.new_zeros(len(gradient)).index_add_(0, pack.target_rows, by_logprobs)
            gradient.addcmul_(others, totals[:, None], value=-1)
            of_target = by_logprobs - logprobs.exp() * totals[pack.target_rows]
            for part in torch.arange(len(logprobs), device=logprobs.device).split(4096):
                embeddings = ctx.head.weight[pack.target_tokens[part]].to(gradient.dtype)
                gradient.index_add_(0, pack.target_rows[part], embeddings.mul_(of_target[part, None]))
        if by_entropies is not None:
            if slopes is None:
                raise RuntimeError("the entropies are in the loss, but were computed without entropy_gradient")
            gradient.addcmul_(slopes, by_entropies[:, None], value=-1)
        gradient /= pack.row_temperatures[:, None].to(gradient.dtype)
        hidden = gradient.new_zeros(ctx.shape, dtype=ctx.dtype)
        hidden.index_add_(0, pack.row_nodes, gradient.to(ctx.dtype))
        return hidden, None, None, None, None, None


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """``left @ right`` accumulated and returned in ``dtype``: 16-bit logits would be off by whole percents."""
    if left.dtype == dtype:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)
