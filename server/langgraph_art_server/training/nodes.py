"""Choosing nodes by name, path or pattern.

Invariant: the same words choose the same nodes as `GraphRun.calls_at` on the client: a name, a full path or any stretch
of it, and so everything in a subgraph by the subgraph's name. Each part may be a shell pattern.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase


def matches(path: str, pattern: str) -> bool:
    """Whether a node is meant by a pattern.

    Args:
        path: Node path, such as ``planner|model``.
        pattern: ``model``, ``planner``, ``planner|model``, ``plan*`` or ``planner|*``, for example.
    """
    parts, wanted = path.split("|"), pattern.split("|")
    return any(
        all(map(fnmatchcase, parts[start : start + len(wanted)], wanted))
        for start in range(len(parts) - len(wanted) + 1)
    )


def chosen(path: str, patterns: Collection[str] | None) -> bool:
    """Whether any pattern means a node; ``None`` means all nodes."""
    return patterns is None or any(matches(path, pattern) for pattern in patterns)


def weight_of(path: str, weights: Mapping[str, float]) -> float:
    """The factor that a node has: that of the longest pattern that means it, 1 if none does."""
    meant = [pattern for pattern in weights if matches(path, pattern)]
    return weights[max(meant, key=lambda pattern: (len(pattern), pattern))] if meant else 1.0
