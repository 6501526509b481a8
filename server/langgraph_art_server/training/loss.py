"""The policy-gradient loss of one pack and its gradient with respect to the hidden states.

With one step per submission the old policy is the current one, so the ratio is exactly 1 and

    loss = - sum over entries of  weight * advantage * exp(logp - stop_gradient(logp)),

whose gradient is that of REINFORCE with the group as baseline. Invariant: logits exist only for the rows that predict
a trained token, one chunk of rows at a time and in float32 or wider; each chunk's gradient is taken before the next
chunk is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from langgraph_art_server.training.tree import Pack

CHUNK_ROWS = 128
"""Rows of logits that exist at once: 128 rows of a vocabulary of 49,152 are 25 MB in float32."""


@dataclass(frozen=True)
class PackLoss:
    """Loss of one pack."""

    loss: float
    """This pack's share of the submission's loss."""
    gradient: Tensor
    """[N, hidden]: gradient of the loss with respect to the hidden states."""
    logprobs: Tensor
    """float64 [E], on the CPU: the trainer's logprob of each entry's token."""
    entropies: Tensor
    """float64 [E], on the CPU: entropy (nats) of the distribution that each entry's token was drawn from."""


def surrogate(logprobs: Tensor, coefficients: Tensor) -> Tensor:
    """Computes the loss of entries whose old policy is the current one.

    Args:
        logprobs: [E], with gradient.
        coefficients: [E], weight times advantage.

    Returns:
        Scalar. Its value is minus the sum of the coefficients; only its gradient depends on the logprobs.
    """
    return -(coefficients * torch.exp(logprobs - logprobs.detach())).sum()


def pack_loss(hidden: Tensor, head: nn.Linear, pack: Pack, *, chunk_rows: int = CHUNK_ROWS) -> PackLoss:
    """Computes the loss of a pack from the model's last hidden states, without building a graph over the logits.

    The gradient of a logprob with respect to its logits is known (one-hot minus softmax), so the two big products of
    the head, logits and gradient, are each done once: nothing is recomputed and no logits are kept.

    Args:
        hidden: [N, hidden], the last hidden states, after the final norm. Not modified.
        head: The output embedding, a linear layer ``hidden -> vocabulary``.
        pack: The pack, on the device of ``hidden``.
        chunk_rows: Rows of logits at a time.

    Returns:
        Loss, gradient and the values that metrics are made of.
    """
    rows = hidden.detach()[pack.row_nodes]
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    bounds = torch.searchsorted(pack.target_rows, torch.arange(0, len(rows) + chunk_rows, chunk_rows).to(rows.device))
    target_logprobs = torch.empty(len(pack.target_rows), dtype=dtype, device=rows.device)
    row_entropies = torch.empty(len(rows), dtype=dtype, device=rows.device)
    row_gradients = torch.empty_like(rows)
    coefficients = pack.entry_coefficients.to(dtype)
    # One slot per target: with a ratio of 1 the gradient of a target is minus the sum of its entries' coefficients.
    target_coefficients = torch.zeros_like(target_logprobs).index_add_(0, pack.entry_targets, coefficients)
    loss = 0.0
    with torch.no_grad():
        for index, start in enumerate(range(0, len(rows), chunk_rows)):
            chunk = rows[start : start + chunk_rows]
            temperature = pack.row_temperatures[start : start + chunk_rows, None].to(dtype)
            targets = slice(int(bounds[index]), int(bounds[index + 1]))
            at = (pack.target_rows[targets] - start, pack.target_tokens[targets])
            log_p = torch.log_softmax(head(chunk).to(dtype).div_(temperature), dim=-1)
            target_logprobs[targets] = log_p[at]
            p = log_p.exp()
            row_entropies[start : start + chunk_rows] = -(p * log_p).sum(-1)
            with torch.enable_grad():
                logprobs = log_p[at].requires_grad_()
                value = surrogate(logprobs, target_coefficients[targets])
                (slope,) = torch.autograd.grad(value, logprobs)
            loss += float(value)
            total = torch.zeros_like(temperature).index_add_(0, at[0], slope[:, None])
            p.mul_(-total)
            p[at] += slope
            row_gradients[start : start + chunk_rows] = (p.div_(temperature).to(chunk.dtype)) @ head.weight
        gradient = torch.zeros_like(hidden).index_add_(0, pack.row_nodes, row_gradients)
    entry_rows = pack.target_rows[pack.entry_targets]
    return PackLoss(
        loss=loss,
        gradient=gradient,
        logprobs=target_logprobs[pack.entry_targets].double().cpu(),
        entropies=row_entropies[entry_rows].double().cpu(),
    )
