"""The objective: from the sampled tokens' logprobs and entropies to one loss, and what is reported about it.

    loss = sum over entries of  weight * (factor * (surrogate + kl * KL + distill * KL_teacher) - entropy * H)

Invariant: every term is a function of E values, so the head's products are the same whatever the options. The factor
corrects expectations over sampled tokens; the entropy is exact for each context and needs none.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from langgraph_art.protocol import TrainConfig
from langgraph_art_server.training.head import Sampled
from langgraph_art_server.training.objective.corrections import CORRECTIONS
from langgraph_art_server.training.objective.divergence import reverse_kl
from langgraph_art_server.training.objective.entries import Entries
from langgraph_art_server.training.objective.surrogates import SURROGATES


@dataclass(frozen=True)
class Loss:
    """Loss of one pack."""

    loss: Tensor
    """Scalar with gradient: this pack's share of the minibatch's loss."""
    measures: dict[str, Tensor]
    """float64 [E] each, without gradient: what metrics are means of."""


def reinforcement(sampled: Sampled, entries: Entries, config: TrainConfig) -> Loss:
    """The loss of reinforcement learning, as the configuration says: ``docs/training.md``.

    Raises:
        ValueError: If a term is on but its logprobs are missing.
    """
    logprobs = sampled.logprobs
    log_ratios = entries.log_ratios(logprobs)
    surrogate = SURROGATES[config.surrogate](logprobs, entries, config.epsilon_low, config.epsilon_high)
    loss = surrogate.loss
    log_rho = entries.before(logprobs) - entries.behaviour
    measures = {
        "entropy": sampled.entropies.detach(),
        "logprob": logprobs.detach(),
        "mismatch_mean": log_rho.abs(),
        "mismatch_kl": log_rho.expm1() - log_rho,
    }
    if entries.old is not None and surrogate.clipped_low is not None and surrogate.clipped_high is not None:
        measures |= {"clip_low": surrogate.clipped_low.double(), "clip_high": surrogate.clipped_high.double()}
    if config.kl:
        if entries.reference is None:
            raise ValueError("kl is on, but the reference's logprobs were not computed")
        kl = reverse_kl(logprobs, entries.reference, log_ratios)
        loss = loss + config.kl * kl
        measures["kl"] = kl.detach()
    if config.teacher is not None:
        kl = reverse_kl(logprobs, entries.teacher, log_ratios)
        loss = loss + config.distill * kl
        measures["teacher_kl"] = kl.detach()
    if config.correction is not None:
        factors, acted = CORRECTIONS[config.correction](log_rho, entries, config.correction_limit)
        loss = loss * factors
        measures["correction_share"] = acted.double()
    if config.entropy:
        loss = loss - config.entropy * sampled.entropies
    return Loss((entries.weights * loss).sum(), measures)


def likelihood(sampled: Sampled, entries: Entries) -> Loss:
    """The loss of supervised fine-tuning: ``- sum over entries of weight * logp``."""
    measures = {"entropy": sampled.entropies.detach(), "logprob": sampled.logprobs.detach()}
    return Loss(-(entries.weights * sampled.logprobs).sum(), measures)
