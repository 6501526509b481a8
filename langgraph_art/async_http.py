"""An HTTP client for the OpenAI SDK that works in every event loop of the process.

Invariant: a connection is only ever used in the loop that opened it. LangChain keeps one async client a process, whose
pooled connections make every second ``asyncio.run()`` fail with "Event loop is closed".
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import AsyncGenerator, Sequence
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import openai

if TYPE_CHECKING:
    import httpx2

sdk_httpx: Any = import_module(openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])
"""The HTTP library that the installed SDK is built on, ``httpx2`` or ``httpx``: their classes are not related."""

SocketOption = tuple[int, int, int]


class PerLoopClient(openai.DefaultAsyncHttpxClient):
    """Builds requests itself and sends each through the running loop's own client."""

    def __init__(self, proxy: str | None, socket_options: Sequence[SocketOption] | None, *, trust_env: bool) -> None:
        super().__init__(trust_env=trust_env)
        self._proxy = proxy
        self._trust_env_proxies = trust_env
        self._socket_options = socket_options
        self._clients: dict[asyncio.AbstractEventLoop, tuple[httpx2.AsyncClient, AsyncGenerator[None, None]]] = {}
        self._lock = threading.Lock()

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request, as `httpx2.AsyncClient.send`."""
        loop = asyncio.get_running_loop()
        with self._lock:
            known = self._clients.get(loop)
        if known is None:
            client = self._open()
            closer = _close_with_loop(client)
            await anext(closer)  # never waits, so no other task gets here in between
            with self._lock:
                # Connections hold their loop, so weak keys would never go: closed loops are dropped here.
                self._clients = {old: entry for old, entry in self._clients.items() if not old.is_closed()}
                known = self._clients[loop] = (client, closer)
        return await known[0].send(request, **options)

    async def aclose(self) -> None:
        """Close the running loop's connections; a later request opens new ones."""
        with self._lock:
            known = self._clients.pop(asyncio.get_running_loop(), None)
        if known is not None:
            await known[1].aclose()

    def _open(self) -> httpx2.AsyncClient:
        if self._socket_options is None:
            return openai.DefaultAsyncHttpxClient(
                proxy=self._proxy, trust_env=self._trust_env_proxies, verify=_ssl_context()
            )
        transport = sdk_httpx.AsyncHTTPTransport(
            proxy=self._proxy,
            socket_options=self._socket_options,
            limits=openai.DEFAULT_CONNECTION_LIMITS,
            verify=_ssl_context(),
        )
        return openai.DefaultAsyncHttpxClient(transport=transport)


async def _close_with_loop(client: httpx2.AsyncClient) -> AsyncGenerator[None, None]:
    """Once started, closes the client when the loop ends: ``asyncio.run`` closes all async generators of its loop."""
    try:
        yield
    finally:
        await client.aclose()


@lru_cache
def _ssl_context() -> ssl.SSLContext:
    """One for all loops: reading the certificates costs more than a call, and ``asyncio.run`` per call is common."""
    context: ssl.SSLContext = sdk_httpx.create_ssl_context()
    return context


@lru_cache
def per_loop_client(
    proxy: str | None, socket_options: tuple[SocketOption, ...] | None, *, trust_env: bool
) -> PerLoopClient:
    """The process's client for these options; apps build a model anew at every call, and should share connections.

    Args:
        proxy: URL of the proxy that the user named.
        socket_options: of each connection; ``None`` leaves the library's.
        trust_env: whether proxies that the environment names are used.
    """
    return PerLoopClient(proxy, socket_options, trust_env=trust_env)


@lru_cache
def direct_client() -> httpx2.Client:
    """The process's blocking client that uses no proxy, whatever the environment says."""
    return openai.DefaultHttpxClient(trust_env=False)
