"""The way of one call: resolve the version, ask the engine, record, answer.

Invariant: the record is committed before the last chunk or the body goes out, so an answer that a client has seen whole
is on disk. A client that goes away ends the engine's work, and what was sampled up to then is kept.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import unquote

import anyio
import httpx
import orjson
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from langgraph_art import protocol
from langgraph_art_server.errors import ApiError, BadRequest, Unavailable, body_of
from langgraph_art_server.serving.adapters import Adapters
from langgraph_art_server.serving.capture import CallHeader, Capture
from langgraph_art_server.serving.compute import ComputeLease
from langgraph_art_server.serving.engine import Engine
from langgraph_art_server.storage.calls import CallStore

_PATH = "/v1/chat/completions"


class Gateway:
    """OpenAI-compatible chat completions in front of the engine."""

    def __init__(
        self, engine: Engine, adapters: Adapters, calls: CallStore, compute: ComputeLease, default_max_tokens: int
    ) -> None:
        self._engine = engine
        self._adapters = adapters
        self._calls = calls
        self._compute = compute
        self._default_max_tokens = default_max_tokens
        self._open: dict[str, int] = {}
        self._closed = asyncio.Condition()

    async def chat(
        self, headers: Mapping[str, str], body: dict[str, Any], gone: Callable[[], Coroutine[Any, Any, None]]
    ) -> Response:
        """Answer one request.

        Args:
            headers: Request headers, lower case.
            body: Request body.
            gone: Waits until the client has gone away; only used while nothing was sent yet.

        Raises:
            ApiError: The request was refused, or the engine could not answer.
        """
        header = _header(headers)
        if not isinstance(body.get("model"), str):
            raise BadRequest("the request names no model", code="model_not_found")
        # Held until the answer has ended, which for a stream is after this method returns.
        held = AsyncExitStack()
        try:
            await held.enter_async_context(self._opened(header.call_id))
            await self._engine.wait_ready()
            target = await self._adapters.resolve(body["model"], header.pin)
            capture = Capture(header, body, target)
            await held.enter_async_context(self._compute.call())
            name = await held.enter_async_context(self._adapters.lease(target))
            request = self._engine.http.build_request(
                "POST",
                _PATH,
                content=orjson.dumps(capture.request(name, self._default_max_tokens)),
                headers={"content-type": "application/json"},
            )
            work = asyncio.ensure_future(self._send(request, capture, stream=bool(body.get("stream"))))
            watch = asyncio.ensure_future(gone())
            try:
                await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    raise _ClientGone
                upstream = work.result()
            finally:
                watch.cancel()
                work.cancel()
            answer_headers = {} if target.name is None else {protocol.HEADER_VERSION: target.name}
            if upstream.status_code != 200:
                raise await self._refusal(upstream, header, body)
            if body.get("stream"):
                held.push_async_callback(upstream.aclose)
                return _HeldStream(self._stream(upstream, capture), held.pop_all(), answer_headers)
            answer = orjson.loads(upstream.content)
            capture.take(answer)
            await self._record(capture)
            return Response(orjson.dumps(answer), media_type="application/json", headers=answer_headers)
        except _ClientGone:
            await self._record(capture)
            # Nobody reads it; 499 is the usual mark in access logs.
            return Response(status_code=499)
        finally:
            await held.aclose()

    async def wait_closed(self, call_ids: list[str], timeout: float) -> None:
        """Wait up to ``timeout`` seconds until none of these calls is open any more."""

        def closed() -> bool:
            return not any(call_id in self._open for call_id in call_ids)

        async with self._closed:
            try:
                await asyncio.wait_for(self._closed.wait_for(closed), timeout)
            except TimeoutError:
                # The join reports such calls one by one.
                return

    async def _send(self, request: httpx.Request, capture: Capture, *, stream: bool) -> httpx.Response:
        try:
            return await self._engine.http.send(request, stream=stream)
        except httpx.TransportError as error:
            await self._record(capture, failed=True)
            raise _engine_gone(capture.header) from error

    async def _stream(self, upstream: httpx.Response, capture: Capture) -> AsyncIterator[bytes]:
        recorded = False
        # From the chunk that ends the last choice on, chunks wait for the record.
        waiting: list[bytes] = []
        try:
            async for line in upstream.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = orjson.loads(line[6:])
                if "error" in chunk or capture.take(chunk):
                    waiting.append(_event(chunk))
                if not capture.finished:
                    for event in waiting:
                        yield event
                    waiting.clear()
            await self._record(capture)
            recorded = True
            for event in waiting:
                yield event
            yield b"data: [DONE]\n\n"
        except httpx.TransportError:
            await self._record(capture, failed=True)
            recorded = True
            yield _event({"error": body_of(_engine_gone(capture.header))})
        finally:
            if not recorded:
                # The client went away: the record must be made although this task is being cancelled.
                with anyio.CancelScope(shield=True):
                    await self._record(capture)

    async def _record(self, capture: Capture, *, failed: bool = False) -> None:
        await asyncio.to_thread(self._calls.save, capture.records(failed=failed))

    async def _refusal(self, upstream: httpx.Response, header: CallHeader, body: dict[str, Any]) -> ApiError:
        """The engine's refusal in our words where we know more than it does."""
        content = await upstream.aread()
        await upstream.aclose()
        try:
            message = str(orjson.loads(content)["error"]["message"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            message = content.decode(errors="replace")[:500]
        if upstream.status_code == 400 and "context length" in message:
            return await self._context_error(header, body, message)
        if upstream.status_code >= 500:
            return Unavailable(f"the engine failed{_at(header)}: {message}", code="engine_error", retry_after=1)
        error = BadRequest(f"the engine refused the call{_at(header)}: {message}", code="engine_refused")
        error.status = upstream.status_code
        return error

    async def _context_error(self, header: CallHeader, body: dict[str, Any], message: str) -> ApiError:
        limit = self._engine.max_model_len
        answer = await self._engine.http.post(
            "/tokenize",
            json={"model": self._engine.model.name, "messages": body.get("messages"), "tools": body.get("tools")},
        )
        if answer.status_code != 200:
            return BadRequest(f"the prompt is too long{_at(header)}: {message}", code="context_length_exceeded")
        count = answer.json()["count"]
        wanted = body.get("max_completion_tokens") or body.get("max_tokens")
        asked = f" and the answer may take {wanted}" if wanted and count < limit else ""
        return BadRequest(
            f"the prompt is too long{_at(header)}: it has {count} tokens{asked}, the context holds {limit}. Shorten "
            "the messages, lower max_tokens, or start the server with a larger --max-model-len.",
            code="context_length_exceeded",
        )

    def _opened(self, call_id: str) -> _Opened:
        return _Opened(self._open, self._closed, call_id)


class _HeldStream(StreamingResponse):
    """A stream that holds leases until it has ended, also if the client goes away before its first chunk."""

    def __init__(self, content: AsyncIterator[bytes], held: AsyncExitStack, headers: Mapping[str, str]) -> None:
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await super().__call__(scope, receive, send)


class _Opened:
    """Counts a call as open while its record may still come."""

    def __init__(self, calls: dict[str, int], closed: asyncio.Condition, call_id: str) -> None:
        self._calls, self._closed, self._call_id = calls, closed, call_id

    async def __aenter__(self) -> None:
        self._calls[self._call_id] = self._calls.get(self._call_id, 0) + 1

    async def __aexit__(self, *_: object) -> None:
        self._calls[self._call_id] -= 1
        if not self._calls[self._call_id]:
            del self._calls[self._call_id]
        await asyncio.shield(asyncio.ensure_future(self._notify()))

    async def _notify(self) -> None:
        async with self._closed:
            self._closed.notify_all()


class _ClientGone(Exception):
    """The client went away before anything was sent."""


def _header(headers: Mapping[str, str]) -> CallHeader:
    retry = headers.get(protocol.HEADER_RETRY, "0")
    node = headers.get(protocol.HEADER_NODE)
    return CallHeader(
        call_id=headers.get(protocol.HEADER_CALL) or uuid.uuid4().hex,
        attempt=int(retry) if retry.isdecimal() else 0,
        run_id=headers.get(protocol.HEADER_RUN) or None,
        group_id=headers.get(protocol.HEADER_GROUP) or None,
        node=unquote(node) if node is not None else None,
    )


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _engine_gone(header: CallHeader) -> Unavailable:
    return Unavailable(
        f"the engine went away during the call{_at(header)}; it is being restarted",
        code="engine_restarting",
        retry_after=5,
    )


def _at(header: CallHeader) -> str:
    """Where a call came from, for messages."""
    return f" at node {header.node!r}" if header.node else ""
