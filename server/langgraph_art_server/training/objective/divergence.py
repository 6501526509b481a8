"""Reverse KL divergence to another model, from its logprobs of our own sampled tokens.

Used for the KL to a reference version and for on-policy distillation, where the other model is the teacher. Invariant:
value and gradient are unbiased, also after the first of several steps, as tests show by enumeration.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reverse_kl(logprobs: Tensor, other: Tensor, log_ratios: Tensor) -> Tensor:
    """Estimates KL(policy, other) at each token as ``r (exp(d) - 1 - d)`` with ``d = other - logp``.

    This is the estimator k3 (http://joschu.net/blog/kl-approx.html) times the ratio ``r = exp(logp - old)``. The ratio
    is not detached, not even where it is 1: k3 alone has the gradient of the *forward* KL
    (https://arxiv.org/abs/2512.02556, section 3.1; TRL's ``use_bias_correction_kl``). The gradient of the product is
    ``r (logp - other) d logp``, token for token that of k2, ``(logp - other)^2 / 2``, weighted by r; as a loss it is
    what on-policy distillation subtracts from the advantage (https://thinkingmachines.ai/blog/on-policy-distillation/).

    Args:
        logprobs: [E], with gradient.
        other: [E], logprobs under the other model; NaN where it has none, for which the estimate is 0.
        log_ratios: [E], ``logp - old``, with gradient.

    Returns:
        [E], never negative.
    """
    difference = torch.where(other.isnan(), 0.0, other - logprobs)
    return log_ratios.exp() * (difference.expm1() - difference)
