"""AdamW over one policy's adapter: clipping, the learning rate's schedule, and state that outlives the process.

Invariant: a step depends on the weights, the moments, the number of steps taken, the gradient and the configuration
only, and the first three are in the version's checkpoint. So a training that stops after any version and goes on in
another process equals one that never stopped, bit for bit on CPU. There is no random state to keep: nothing in an
update is random (no dropout, no shuffling beyond a seed in the configuration).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from langgraph_art.protocol import TrainConfig
from langgraph_art_server.training.checkpoint import Checkpoint

BETAS = (0.9, 0.99)
"""Decay of AdamW's moments, as in the widely used LoRA GRPO recipes of Unsloth (``adam_beta2 = 0.99``): RL takes tens
to hundreds of steps, over which the usual 0.999 would average gradients of policies long gone."""

EPSILON = 1e-8
"""PyTorch's default. Not smaller: runs that sampled the same tokens with opposite advantages leave a gradient of pure
rounding noise (about 1e-10), which a smaller epsilon would turn into steps of full size."""

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """Takes the steps of one policy's update (AdamW, https://arxiv.org/abs/1711.05101).

    Args:
        parameters: The adapter's weights by name, already those of the parent.
        config: ``learning_rate``, ``schedule``, ``warmup_steps``, ``schedule_steps``, ``max_grad_norm`` and
            ``weight_decay``.
        policy: Name of the policy: chooses its learning rate and is named in errors.
        parent: The version trained from, whose moments and step count go on; ``None`` for version 0.

    Raises:
        ValueError: If the configuration has no learning rate for the policy.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], config: TrainConfig, policy: str, parent: Checkpoint | None
    ) -> None:
        self._parameters = parameters
        self._config = config
        self._policy = policy
        self._peak = learning_rate_of(config, policy)
        self._taken = parent.state.step if parent else 0
        self._adamw = torch.optim.AdamW(
            parameters.values(), lr=self._peak, betas=BETAS, eps=EPSILON, weight_decay=config.weight_decay
        )
        for name, parameter in parameters.items():
            # A checkpoint without moments begins a new stage: RL after supervised fine-tuning.
            resumed = parent is not None and f"{name}.{MOMENTS[0]}" in parent.optimizer
            self._adamw.state[parameter] = {"step": torch.tensor(float(self._taken))} | {
                moment: parent.optimizer[f"{name}.{moment}"].to(parameter.device, copy=True)
                if parent is not None and resumed
                else torch.zeros_like(parameter, requires_grad=False)
                for moment in MOMENTS
            }

    def step(self) -> dict[str, float]:
        """Clips the accumulated gradients together, applies them and clears them.

        Returns:
            ``grad_norm`` before clipping, the ``learning_rate`` used, and ``step``: steps taken since version 0, or
            since the last supervised fine-tuning.

        Raises:
            FloatingPointError: If the gradient is not finite; nothing was changed.
            ValueError: If the schedule has no steps left: its learning rate would be 0.
        """
        rate = self._peak * schedule_factor(self._config, self._taken, self._policy)
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._config.max_grad_norm))
        if not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"the gradient of policy {self._policy} is not finite ({grad_norm}); nothing was changed"
            )
        self._adamw.param_groups[0]["lr"] = rate
        self._adamw.step()
        self._adamw.zero_grad()
        self._taken += 1
        return {"grad_norm": grad_norm, "learning_rate": rate, "step": float(self._taken)}

    def state(self) -> tuple[dict[str, Tensor], int]:
        """The moments, as ``<weight>.exp_avg`` and ``<weight>.exp_avg_sq``, and the steps taken: for the checkpoint."""
        moments = {
            f"{name}.{moment}": self._adamw.state[parameter][moment]
            for name, parameter in self._parameters.items()
            for moment in MOMENTS
        }
        return moments, self._taken


def learning_rate_of(config: TrainConfig, policy: str) -> float:
    """The policy's learning rate before the schedule.

    Raises:
        ValueError: If the configuration gives learning rates by policy, but none for this one.
    """
    if not isinstance(config.learning_rate, dict):
        return config.learning_rate
    if policy not in config.learning_rate:
        raise ValueError(
            f"no learning rate for policy {policy}: learning_rate names {', '.join(sorted(config.learning_rate))} only"
        )
    return config.learning_rate[policy]


def schedule_factor(config: TrainConfig, taken: int, policy: str) -> float:
    """What the learning rate of a step is multiplied by.

    With w warm-up steps and S steps in all, step t (0 for the first) has ``(t + 1) / (w + 1)`` while ``t < w``; then 1
    (constant), ``(S - t) / (S - w)`` (linear) or ``(1 + cos(pi (t - w) / (S - w))) / 2`` (cosine,
    https://arxiv.org/abs/1608.03983). It reaches 0 one step after the last, so every step moves.

    Args:
        config: ``schedule``, ``warmup_steps`` and ``schedule_steps``.
        taken: Steps taken before.
        policy: Named in the error.

    Raises:
        ValueError: If all steps of the schedule have been taken.
    """
    warmup, total = config.warmup_steps, config.schedule_steps
    if taken < warmup:
        return (taken + 1) / (warmup + 1)
    if config.schedule == "constant":
        return 1.0
    if total is None:
        raise ValueError(f"schedule={config.schedule!r} needs schedule_steps, the steps of the whole training")
    if taken >= total:
        raise ValueError(
            f"policy {policy} has taken all {total} steps of its {config.schedule} schedule, and the learning rate is "
            f"0 from here on: raise schedule_steps, or go on with schedule='constant' and a small learning rate"
        )
    if config.schedule == "linear":
        return (total - taken) / (total - warmup)
    return (1 + math.cos(math.pi * (taken - warmup) / (total - warmup))) / 2
