"""What every route needs: the rooms of the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from fastapi import Request

if TYPE_CHECKING:
    from langgraph_art_server.app import Server


def server_of(request: Request) -> Server:
    """The server that answers a request."""
    return cast("Server", request.app.state.server)
