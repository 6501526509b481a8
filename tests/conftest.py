"""What all tests share.

Invariant: a test that needs the real engine counts as slow, so `-m "not slow"` is the fast set.
"""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("engine"):
            item.add_marker(pytest.mark.slow)
