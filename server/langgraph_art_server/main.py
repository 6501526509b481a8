"""Runs the server until it is told to stop."""

from __future__ import annotations

import logging
import socket

import uvicorn
from filelock import FileLock, Timeout

from langgraph_art_server.app import create_app
from langgraph_art_server.config import ServerSettings


class CannotServe(Exception):
    """The server cannot start; the message says what to do."""


def serve(settings: ServerSettings) -> None:
    """Serve until SIGINT or SIGTERM, then stop the engine and return.

    Raises:
        CannotServe: The port or the data directory is taken, or an option has no effect on the device.
        ModelNotFound: The base model cannot be had.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for noisy in ("httpx", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # Bound first: a taken port must not cost a minute of engine start.
    listener = _listen(settings.host, settings.port)
    data_dir = settings.data_dir.expanduser().resolve()
    data_dir.mkdir(parents=True, exist_ok=True)
    lock = FileLock(data_dir / "server.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise CannotServe(
            f"another server uses the data directory {settings.data_dir}: stop it or pass another --data-dir"
        ) from error
    with lock, listener:
        host, port = listener.getsockname()[:2]
        logging.getLogger(__name__).info("listening on http://%s:%d", host, port)
        try:
            app = create_app(settings)
        except ValueError as error:
            raise CannotServe(str(error)) from error
        config = uvicorn.Config(
            app,
            log_level="warning",
            # Streams in flight get this long after the signal.
            timeout_graceful_shutdown=5,
        )
        uvicorn.Server(config).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise CannotServe(
            f"cannot listen on {host}:{port}: {error.strerror}. Is a server running there already? "
            "Stop it or pass another --port (0 picks a free one)."
        ) from error
    listener.listen(2048)
    return listener
