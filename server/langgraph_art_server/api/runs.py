"""What was recorded of a run."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from langgraph_art.protocol import RecordedCall
from langgraph_art_server.api.dependencies import server_of

router = APIRouter(prefix="/api/runs")


@router.get("/{run_id}/calls")
async def calls(request: Request, run_id: str) -> list[RecordedCall]:
    """Every call that the gateway recorded for a run, token ids and logprobs included; empty for an unknown run."""
    return await asyncio.to_thread(server_of(request).calls.of_run, run_id)
