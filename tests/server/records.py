"""A recorded call to vary in tests."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from langgraph_art.protocol import RecordedCall


def recorded(call_id: str = "c1", **changes: Any) -> RecordedCall:
    values: dict[str, Any] = {
        "call_id": call_id,
        "attempt": 0,
        "choice": 0,
        "run_id": "r1",
        "node": "plan",
        "model": "desk",
        "policy": "desk",
        "version": 0,
        "status": "complete",
        "finish_reason": "stop",
        "sampling": {"temperature": 1.0},
        "constrained": False,
        "untrainable": None,
        "prompt_ids": [1, 2, 3],
        "sampled_ids": [4, 5],
        "logprobs": [-0.5, -1.5],
        "created_at": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    }
    return RecordedCall(**(values | changes))
