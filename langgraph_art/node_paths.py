"""Choosing nodes by name, path or pattern.

Invariant: the same words choose the same nodes as `GraphRun.calls_at`: a name, a full path or any stretch of it, and so
everything in a subgraph by the subgraph's name. Each part may be a shell pattern.
"""

from __future__ import annotations

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
