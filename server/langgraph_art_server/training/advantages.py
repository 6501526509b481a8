"""Group-relative advantages: how much better a run did than the other runs of the same input.

Invariant: rewards that differ only by float noise give advantages of exactly 0, whatever they are divided by, so that
noise is never scaled up into signal.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal

SCALE_EPSILON = 1e-4
"""Added to the standard deviation before dividing by it."""

TOLERANCE = 1e-9
"""A reward equals its group's mean if they differ by at most this much of the group's largest absolute reward."""


def group_advantages(
    groups: Sequence[Sequence[float]], scale: Literal["none", "group", "batch"]
) -> list[list[float] | None]:
    """Computes ``A_i = (r_i - mean(r)) / s`` for every run of every group.

    ``s`` is 1 for ``"none"``; the standard deviation of the group's rewards plus ``SCALE_EPSILON`` for ``"group"``;
    that of the rewards of all runs together (not centred by group; groups under two runs left out) plus
    ``SCALE_EPSILON`` for ``"batch"``. Standard deviations are of a sample (ddof = 1). Both choices, and the epsilon of
    1e-4, are those of TRL's ``GRPOTrainer`` (``scale_rewards``); TRL computes in float32, this in float64.

    Args:
        groups: Rewards, one sequence for each group. Lengths may differ.
        scale: What to divide by.

    Returns:
        For each group its advantages in the order of its rewards, or ``None`` if it has fewer than two runs.

    Raises:
        ValueError: If a reward is not a finite number.
    """
    for index, rewards in enumerate(groups):
        if not all(math.isfinite(reward) for reward in rewards):
            raise ValueError(f"group {index} has a reward that is not a finite number: {list(rewards)}")
    centred = [_centre(rewards) if len(rewards) > 1 else None for rewards in groups]
    if scale == "none":
        return centred
    batch = _deviation([reward for rewards in groups if len(rewards) > 1 for reward in rewards])
    return [
        values and [value / ((batch if scale == "batch" else _deviation(rewards)) + SCALE_EPSILON) for value in values]
        for rewards, values in zip(groups, centred, strict=True)
    ]


def _centre(rewards: Sequence[float]) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    noise = TOLERANCE * max(abs(reward) for reward in rewards)
    return [0.0 if abs(reward - mean) <= noise else reward - mean for reward in rewards]


def _deviation(rewards: Sequence[float]) -> float:
    return statistics.stdev(rewards) if len(rewards) > 1 else 0.0
