"""The gateway's routes: what any OpenAI client can talk to."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from langgraph_art_server.api.dependencies import server_of
from langgraph_art_server.errors import BadRequest

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Chat completions, streamed or whole; ``model`` is a policy, ``policy@version`` or the base model."""
    body = await _body(request)
    return await server_of(request).gateway.chat(request.headers, body, lambda: _gone(request))


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """vLLM's own route, beside ``/v1``: token ids of ``prompt``, or of ``messages`` and ``tools``."""
    return await server_of(request).gateway.tokenize(request.headers, await _body(request))


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The base model, every policy and every version."""
    server = server_of(request)
    names = [server.engine.model.name]
    for policy in await asyncio.to_thread(server.policies.all):
        names.append(policy.name)
        names += [f"{policy.name}@{version.version}" for version in policy.versions]
    return {
        "object": "list",
        "data": [
            {"id": name, "object": "model", "owned_by": "langgraph-art", "max_model_len": server.engine.max_model_len}
            for name in names
        ],
    }


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = orjson.loads(await request.body())
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}", code="invalid_request") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_request")
    return body


async def _gone(request: Request) -> None:
    # The body was read, so the next message from the connection can only be its end.
    while (await request.receive())["type"] != "http.disconnect":
        pass
