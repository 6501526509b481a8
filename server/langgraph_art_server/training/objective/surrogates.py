"""Surrogates: losses whose gradient stands for the policy gradient.

Each gives the loss of every entry, before its weight. With the advantage A, the logprob logp and the ratio
``r = exp(logp - old)``, sg for stop-gradient. Invariant: where r is 1, all have the gradient of ``-A logp``, the policy
gradient with the group as baseline; they differ only after the first of several steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from langgraph_art_server.training.objective.entries import Entries


@dataclass(frozen=True)
class Surrogate:
    """A surrogate's value."""

    loss: Tensor
    """[E], with gradient."""
    clipped_low: Tensor | None = None
    """bool [E]: where the lower limit of the ratio acted; ``None`` if the surrogate has no limits."""
    clipped_high: Tensor | None = None
    """bool [E]: where the upper limit acted."""


def clip(logprobs: Tensor, entries: Entries, low: float | None, high: float | None) -> Surrogate:
    """PPO's clipped surrogate, as in GRPO: ``-min(r A, clip(r, 1 - low, 1 + high) A)``.

    https://arxiv.org/abs/1707.06347 and https://arxiv.org/abs/2402.03300, both with limits 0.2 and 0.2, the defaults;
    DAPO (https://arxiv.org/abs/2503.14476) raises the upper one to 0.28.
    """
    return _clip(entries.log_ratios(logprobs).exp(), entries.advantages, low or 0.2, high or 0.2)


def sequence_clip(logprobs: Tensor, entries: Entries, low: float | None, high: float | None) -> Surrogate:
    """GSPO: :func:`clip` with one ratio for each call, ``exp(mean over its tokens of (logp - old))``.

    https://arxiv.org/abs/2507.18071; its limits (section 5.1), 3e-4 and 4e-4, are the defaults.
    """
    ratios = entries.call_means(entries.log_ratios(logprobs)).exp()
    return _clip(ratios, entries.advantages, low or 3e-4, high or 4e-4)


def _clip(ratios: Tensor, advantages: Tensor, low: float, high: float) -> Surrogate:
    return Surrogate(
        loss=-torch.minimum(ratios * advantages, ratios.clamp(1 - low, 1 + high) * advantages),
        clipped_low=(ratios < 1 - low) & (advantages < 0),
        clipped_high=(ratios > 1 + high) & (advantages > 0),
    )


def cispo(logprobs: Tensor, entries: Entries, low: float | None, high: float | None) -> Surrogate:
    """CISPO: ``-sg(clip(r, 1 - low, 1 + high)) A logp``; a limited ratio still leaves the token its gradient.

    https://arxiv.org/abs/2506.13585. As there, no lower limit by default; the default upper one, 1 + 4, is the 5 of
    ScaleRL (https://arxiv.org/abs/2510.13786).
    """
    ratios = entries.log_ratios(logprobs).detach().exp()
    least, most = 1 - (low or 1.0), 1 + (high or 4.0)
    return Surrogate(
        loss=-ratios.clamp(least, most) * entries.advantages * logprobs,
        clipped_low=ratios < least,
        clipped_high=ratios > most,
    )


def reinforce(logprobs: Tensor, entries: Entries, low: float | None, high: float | None) -> Surrogate:
    """REINFORCE (Williams, 1992, https://doi.org/10.1007/BF00992696): ``-A logp``. No ratio, so no limits."""
    return Surrogate(loss=-entries.advantages * logprobs)


SURROGATES: dict[str, Callable[[Tensor, Entries, float | None, float | None], Surrogate]] = {
    "clip": clip,
    "sequence_clip": sequence_clip,
    "cispo": cispo,
    "reinforce": reinforce,
}
"""By the values of ``TrainConfig.surrogate``."""
