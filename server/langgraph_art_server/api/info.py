"""Whether the server serves, and what it is."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from langgraph_art.protocol import PROTOCOL_VERSION, CallStoreInfo, ServerInfo
from langgraph_art_server.api.dependencies import server_of

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """200 once calls are served, also by an engine that rests, as they wake it; else 503.

    The reason is in ``/api/info``, which may need a key.
    """
    engine = server_of(request).engine
    content = {"status": engine.state} | ({"phase": engine.phase} if engine.state == "starting" else {})
    return JSONResponse(content, status_code=200 if engine.state in ("ready", "idle") else 503)


@router.get("/api/info")
async def info(request: Request) -> ServerInfo:
    """What this server is and serves."""
    server = server_of(request)
    return ServerInfo(
        version=version("langgraph-art"),
        protocol=PROTOCOL_VERSION,
        base_model=server.engine.model.name,
        max_model_len=server.engine.max_model_len,
        device=server.engine.device,
        engine=server.engine.state,
        engine_phase=server.engine.phase if server.engine.state == "starting" else None,
        engine_error=server.engine.error,
        policies=await asyncio.to_thread(server.policies.names),
    )


@router.get("/api/calls")
async def calls(request: Request) -> CallStoreInfo:
    """How much is recorded, and how much of it no submission claims."""
    return await asyncio.to_thread(server_of(request).calls.info)
