"""The sampled tokens of one pack as an objective sees them: E values each, in float64.

Invariant: all tokens of a call are among the entries, next to each other, so what is defined over a whole call (the
sequence of sequence-level methods) can be computed here, whatever the packs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from langgraph_art_server.training.tree import Pack


@dataclass(frozen=True)
class Entries:
    """The constants of a pack's loss; the variable is the logprobs of the policy being trained."""

    calls: Tensor
    """int64 [E]: index of the entry's call, ascending from 0."""
    advantages: Tensor
    """[E]."""
    weights: Tensor
    """[E]: share of the entry in the mean over the minibatch."""
    behaviour: Tensor
    """[E]: logprobs under the engine that sampled."""
    teacher: Tensor
    """[E]: logprobs under the teacher; NaN without distillation."""
    old: Tensor | None = None
    """[E]: logprobs under the policy before its first step on this submission; ``None`` while no step was taken, which
    makes the ratio exactly 1."""
    reference: Tensor | None = None
    """[E]: logprobs under the version to stay close to; ``None`` without a KL term."""

    @classmethod
    def of(cls, pack: Pack, *, old: Tensor | None = None, reference: Tensor | None = None) -> Entries:
        """Takes a pack's entries, on its device; ``old`` and ``reference`` are moved there."""
        device = pack.entry_calls.device
        return cls(
            calls=pack.entry_calls,
            advantages=pack.entry_advantages,
            weights=pack.entry_weights,
            behaviour=pack.entry_logprobs,
            teacher=pack.entry_teacher,
            old=None if old is None else old.to(device),
            reference=None if reference is None else reference.to(device),
        )

    def before(self, logprobs: Tensor) -> Tensor:
        """[E]: ``old``, or what it is while no step was taken: ``logp``, without gradient."""
        return logprobs.detach() if self.old is None else self.old

    def log_ratios(self, logprobs: Tensor) -> Tensor:
        """[E]: ``logp - old``, with gradient."""
        return logprobs - self.before(logprobs)

    def call_sums(self, values: Tensor) -> Tensor:
        """[E]: for each entry the sum of ``values`` over its call, with gradient."""
        sums = values.new_zeros(int(self.calls[-1]) + 1).index_add(0, self.calls, values)
        return sums[self.calls]

    def call_means(self, values: Tensor) -> Tensor:
        """[E]: for each entry the mean of ``values`` over its call, with gradient."""
        return self.call_sums(values) / self.call_sums(torch.ones_like(values))
