"""Submissions and the jobs made from them."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from sse_starlette import EventSourceResponse

from langgraph_art.protocol import Job, Submission
from langgraph_art_server.api.dependencies import server_of

router = APIRouter(prefix="/api")


@router.post("/submissions", status_code=202)
async def submit(request: Request, body: Submission) -> Job:
    """Store a submission durably and queue it; the same idempotency key returns the first job."""
    return await server_of(request).runner.submit(body)


@router.get("/jobs/{job_id}")
async def get_job(request: Request, job_id: str) -> Job:
    """A job as it is now."""
    return await server_of(request).runner.job(job_id)


@router.get("/jobs/{job_id}/events")
async def follow_job(request: Request, job_id: str) -> EventSourceResponse:
    """A job every time it changes, as server-sent events, until it has finished or failed."""
    runner = server_of(request).runner
    await runner.job(job_id)  # an unknown job is a 404 before the stream begins

    async def events() -> AsyncIterator[dict[str, str]]:
        async for job in runner.follow(job_id):
            yield {"data": job.model_dump_json()}

    return EventSourceResponse(events(), ping=15)
