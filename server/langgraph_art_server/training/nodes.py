"""Which nodes train, and with what weight. Invariant: patterns mean what `langgraph_art.node_paths` says."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from langgraph_art.node_paths import matches


def chosen(path: str, patterns: Collection[str] | None) -> bool:
    """Whether any pattern means a node; ``None`` means all nodes."""
    return patterns is None or any(matches(path, pattern) for pattern in patterns)


def weight_of(path: str, weights: Mapping[str, float]) -> float:
    """The factor that a node has: that of the longest pattern that means it, 1 if none does."""
    meant = [pattern for pattern in weights if matches(path, pattern)]
    return weights[max(meant, key=lambda pattern: (len(pattern), pattern))] if meant else 1.0
