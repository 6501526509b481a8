"""Supervised fine-tuning: jobs like those of submissions."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from langgraph_art.protocol import Job, SftSubmission
from langgraph_art_server.api.dependencies import server_of

router = APIRouter(prefix="/api")


@router.post("/sft", status_code=202)
async def submit(request: Request, body: SftSubmission) -> Job:
    """Store examples durably and queue the fine-tuning; the same idempotency key returns the first job."""
    server = server_of(request)
    await asyncio.to_thread(server.policies.get, body.policy)  # an unknown policy is a 404 before anything is stored
    return await server.runner.submit(body)
