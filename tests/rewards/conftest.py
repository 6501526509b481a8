"""Runs made by hand: what a recorder would have made of a graph with a planner and a writer."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from langgraph_art.runs import GraphRun, NodeCall

START = datetime(2026, 1, 1, tzinfo=UTC)


def call(
    node: str,
    answer: str = "",
    *,
    prompt: str = "go",
    tools: tuple[tuple[str, dict[str, Any]], ...] = (),
    written: int = 10,
    model: str = "desk",
) -> NodeCall:
    return NodeCall(
        call_id=f"{node}-{answer}",
        node=node,
        model=model,
        messages=[{"type": "human", "content": prompt}],
        response={
            "type": "ai",
            "content": answer,
            "tool_calls": [{"name": name, "args": args, "id": str(i)} for i, (name, args) in enumerate(tools)],
        },
        usage={"input_tokens": 100, "output_tokens": written, "total_tokens": 100 + written},
        started_at=START,
        delivered=True,
        art=True,
    )


def run(answer: Any = "Paris", *calls: NodeCall, expected: Any = "Paris", run_id: str = "r") -> GraphRun:
    return GraphRun(
        run_id=run_id,
        input={"question": "capital of France?", "expected": expected},
        output={"answer": answer},
        calls=list(calls),
        started_at=START,
        ended_at=START + timedelta(seconds=3),
    )
