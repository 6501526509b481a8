"""What training and evaluation found, as plain data.

Invariant: every number is computed from runs and from the server's result only, so it can be computed again from what
is saved. A spread is the population standard deviation (ddof 0) over runs.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from langgraph_art.protocol import PolicyUpdate, TrainResult
from langgraph_art.runs import GraphRun, RunGroup


@dataclass
class StepLog:
    """One training step."""

    step: int
    """Number of the step, from 1."""
    reward_mean: float
    """Over the scored runs."""
    reward_std: float
    """Spread over the scored runs."""
    reward_parts: dict[str, float]
    """Mean of each named part of the reward."""
    runs: int
    """Scored runs."""
    failed: int
    """Runs with an infrastructure error, or whose reward could not be computed: not scored, not trained."""
    tokens: int
    """Tokens sampled by ChatART calls, as the server reported their usage."""
    seconds: dict[str, float]
    """Wall-clock time by phase: ``rollout``, ``reward`` (what scoring added after the last run had ended), and from the
    server ``queue``, ``join``, ``train``, ``load``."""
    total_seconds: float
    """Wall-clock time of the whole step."""
    versions: dict[str, int]
    """Version of each policy that the update touched, after it."""
    skipped: dict[str, int]
    """Count of what was not trained, by reason."""
    metrics: dict[str, dict[str, float]]
    """Metrics of the update, by policy: ``loss``, ``grad_norm`` and others, and the update's counts: ``runs``,
    ``calls``, ``trained_tokens``, ``computed_tokens``."""

    @classmethod
    def of(
        cls,
        step: int,
        groups: Sequence[RunGroup],
        result: TrainResult,
        *,
        seconds: dict[str, float],
        total_seconds: float,
    ) -> Self:
        """Summarise a step from its groups and the server's result."""
        runs = [run for group in groups for run in group.runs]
        scores = Scores.of(runs)
        return cls(
            step=step,
            reward_mean=scores.mean,
            reward_std=scores.std,
            reward_parts=scores.parts,
            runs=scores.count,
            failed=scores.failed,
            tokens=sampled_tokens(runs),
            seconds={**seconds, **result.seconds},
            total_seconds=total_seconds,
            versions={update.policy: update.version for update in result.updates},
            skipped=dict(result.skipped),
            metrics={update.policy: _metrics(update) for update in result.updates},
        )


def _metrics(update: PolicyUpdate) -> dict[str, float]:
    counts = update.model_dump(include={"runs", "calls", "trained_tokens", "computed_tokens"})
    return {**update.metrics, **counts}


@dataclass
class TrainHistory:
    """The steps of a training, in order."""

    steps: list[StepLog] = field(default_factory=list)

    @property
    def train_seconds(self) -> float:
        """Wall-clock time of all steps."""
        return sum(step.total_seconds for step in self.steps)

    def save(self, path: str | Path) -> None:
        """Write one JSON object a line; an existing file is replaced in one step."""
        target = Path(path)
        draft = target.with_name(target.name + ".tmp")
        draft.write_text("".join(json.dumps(dataclasses.asdict(step)) + "\n" for step in self.steps), encoding="utf-8")
        draft.replace(target)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what :meth:`save` wrote."""
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        return cls([StepLog(**json.loads(line)) for line in lines])


@dataclass
class Evaluation:
    """Rewards of a policy on some inputs."""

    mean: float
    """Mean reward over the scored runs; 0.0 if there is none."""
    std: float
    """Spread over the scored runs."""
    parts: dict[str, float]
    """Mean of each named part of the reward."""
    failed: int
    """Runs with an infrastructure error, or whose reward could not be computed."""
    versions: list[str]
    """Policy versions that answered, such as ``researcher@12``."""
    groups: list[RunGroup] = field(repr=False)
    """One group for each input, in the order of the inputs."""

    @property
    def runs(self) -> list[GraphRun]:
        """All runs, input by input."""
        return [run for group in self.groups for run in group.runs]

    @classmethod
    def of(cls, groups: list[RunGroup]) -> Self:
        """Summarise scored groups."""
        runs = [run for group in groups for run in group.runs]
        scores = Scores.of(runs)
        versions = sorted({call.version for run in runs for call in run.calls if call.version is not None})
        return cls(scores.mean, scores.std, scores.parts, scores.failed, versions, groups)


@dataclass
class Scores:
    """Statistics of rewards."""

    mean: float
    std: float
    parts: dict[str, float]
    count: int
    failed: int

    @classmethod
    def of(cls, runs: Iterable[GraphRun]) -> Self:
        """Over the runs that have a reward; those with an infrastructure or reward error count as failed."""
        runs = list(runs)
        scored = [run for run in runs if run.reward is not None]
        rewards = [run.reward for run in scored if run.reward is not None]
        sums: defaultdict[str, float] = defaultdict(float)
        for run in scored:
            for name, part in run.reward_parts.items():
                sums[name] += part
        return cls(
            mean=statistics.fmean(rewards) if rewards else 0.0,
            std=statistics.pstdev(rewards) if rewards else 0.0,
            parts={name: value / len(scored) for name, value in sums.items()},
            count=len(scored),
            failed=sum(
                (run.error is not None and run.error.infrastructure) or run.reward_error is not None for run in runs
            ),
        )


def sampled_tokens(runs: Iterable[GraphRun]) -> int:
    """Tokens that ChatART calls of these runs sampled, by their reported usage."""
    usages: list[dict[str, Any]] = [call.usage for run in runs for call in run.calls if call.art and call.usage]
    return sum(int(usage.get("output_tokens", 0)) for usage in usages)
