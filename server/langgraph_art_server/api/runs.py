"""What was recorded of a run: read it, delete it."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from langgraph_art.protocol import DeletedRun, RecordedCall
from langgraph_art_server.api.dependencies import server_of

router = APIRouter(prefix="/api/runs")


@router.get("/{run_id}/calls")
async def calls(request: Request, run_id: str) -> list[RecordedCall]:
    """Every call that the gateway recorded for a run, token ids and logprobs included; empty for an unknown run."""
    return await asyncio.to_thread(server_of(request).calls.of_run, run_id)


@router.delete("/{run_id}")
async def delete(request: Request, run_id: str) -> DeletedRun:
    """Delete everything that was recorded of a run; 409 while a call of it is open or a job is to train it."""
    server = server_of(request)
    server.gateway.require_closed(run_id)
    return await asyncio.to_thread(server.calls.delete_run, run_id)
