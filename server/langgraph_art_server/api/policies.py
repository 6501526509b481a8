"""Policies: list, create, show."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from langgraph_art.protocol import CreatePolicy, Policy
from langgraph_art_server.api.dependencies import server_of

router = APIRouter(prefix="/api/policies")


@router.get("")
async def list_policies(request: Request) -> list[Policy]:
    """All policies by name."""
    return await asyncio.to_thread(server_of(request).policies.all)


@router.post("")
async def create_policy(request: Request, body: CreatePolicy) -> Policy:
    """Create a policy, or return the one that exists with the same adapter shape."""
    return await asyncio.to_thread(server_of(request).policies.create, body)


@router.get("/{name}")
async def get_policy(request: Request, name: str) -> Policy:
    """One policy with its versions."""
    return await asyncio.to_thread(server_of(request).policies.get, name)
