"""The way of one call: resolve the version, ask the engine, record, answer.

Invariant: the record is committed before the last chunk or the body goes out, so an answer that a client has seen whole
is on disk. A client that goes away ends the engine's work, and what was sampled up to then is kept.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import unquote

import httpx
import orjson
from sqlalchemy.exc import SQLAlchemyError
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from langgraph_art import protocol
from langgraph_art_server.errors import ApiError, BadRequest, Conflict, Unavailable, body_of
from langgraph_art_server.serving.adapters import Adapters
from langgraph_art_server.serving.capture import CallHeader, Capture
from langgraph_art_server.serving.compute import ComputeLease
from langgraph_art_server.serving.engine import Engine
from langgraph_art_server.storage.calls import CallStore

log = logging.getLogger(__name__)

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
        # What the prompt leaves of the context is vLLM's to work out.
        self._default_max_tokens = min(default_max_tokens, engine.max_model_len)
        self._open: dict[str, int] = {}  # by call id: requests whose records may still come
        self._open_runs: dict[str, int] = {}  # by run id
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
        async with AsyncExitStack() as held:
            await held.enter_async_context(self._opened(header))
            target = await self._adapters.resolve(body["model"], header.pin)
            capture = Capture(
                header,
                body,
                target,
                strict_tools=self._engine.strict_tools,
                processed_logprobs=self._engine.processed_logprobs,
            )
            # Held while the engine works, not until a slow client has read the last chunk.
            working = await held.enter_async_context(AsyncExitStack())
            await working.enter_async_context(self._engine_time())
            name = await working.enter_async_context(self._adapters.lease(target))
            request = self._engine.http.build_request(
                "POST",
                _PATH,
                content=orjson.dumps(capture.request(name, self._default_max_tokens)),
                headers={"content-type": "application/json"},
            )
            upstream = await self._send(request, capture, gone, stream=bool(body.get("stream")))
            if upstream is None:
                # Nobody reads it; 499 is the usual mark in access logs.
                return Response(status_code=499)
            working.push_async_callback(upstream.aclose)
            answer_headers = {} if target.name is None else {protocol.HEADER_VERSION: target.name}
            if upstream.status_code >= 500:
                # An SDK tries it again, and this attempt was one.
                await self._record(capture, failed=True)
            if upstream.status_code != 200:
                raise await self._refusal(upstream, header, body)
            if body.get("stream"):
                events: asyncio.Queue[bytes | None] = asyncio.Queue()
                pump = asyncio.create_task(self._pump(upstream, capture, events, working.pop_all()))
                held.push_async_callback(_end, pump)
                return _HeldStream(_drain(events), held.pop_all(), answer_headers)
            answer = orjson.loads(upstream.content)
            capture.take(answer)
            await self._record(capture)
            return Response(orjson.dumps(answer), media_type="application/json", headers=answer_headers)

    async def tokenize(self, headers: Mapping[str, str], body: dict[str, Any]) -> Response:
        """Answer vLLM's ``/tokenize``: token ids of a text, or of messages as the chat template puts them in a prompt.

        Raises:
            ApiError: The request was refused, or the engine could not answer.
        """
        header = _header(headers)
        if not isinstance(body.get("model"), str):
            raise BadRequest("the request names no model", code="model_not_found")
        await self._adapters.resolve(body["model"], None)
        await self._engine.wait_ready()
        answer = await self._ask_tokenizer(header, body)
        if answer.status_code != 200:
            raise await self._refusal(answer, header, body)
        return Response(answer.content, media_type="application/json")

    async def wait_ready(self) -> None:
        """Wait until calls are served.

        Raises:
            Unavailable: The engine failed.
        """
        await self._engine.wait_ready()

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

    def require_closed(self, run_id: str) -> None:
        """Refuse if a call of this run is open.

        Raises:
            Conflict: One is.
        """
        if run_id in self._open_runs:
            raise Conflict(f"run {run_id} has an open call: wait until it has ended", code="run_in_use")

    @asynccontextmanager
    async def _engine_time(self) -> AsyncIterator[None]:
        """A ready engine and, on CPU, the right to use the cores."""
        while True:
            await self._engine.wait_ready()
            async with self._compute.call():
                # It may have died while an update held the cores.
                if self._engine.state == "ready":
                    yield
                    return

    async def _send(
        self,
        request: httpx.Request,
        capture: Capture,
        gone: Callable[[], Coroutine[Any, Any, None]],
        *,
        stream: bool,
    ) -> httpx.Response | None:
        """The engine's answer, or ``None`` if the client went away first; then the engine's work ends, too."""
        work = asyncio.ensure_future(self._engine.http.send(request, stream=stream))
        watch = asyncio.ensure_future(gone())
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            await self._record(capture)
            return None
        except httpx.TransportError as error:
            await self._record(capture, failed=True)
            raise _engine_gone(capture.header) from error
        finally:
            watch.cancel()
            work.cancel()

    async def _pump(
        self, upstream: httpx.Response, capture: Capture, events: asyncio.Queue[bytes | None], working: AsyncExitStack
    ) -> None:
        """Move a stream from the engine to ``events``, record it, and end ``events`` with ``None``.

        However it ends, by itself, by the engine's death or because the client went away, the call is recorded.
        """
        # From the chunk that ends the last choice on, chunks wait for the record.
        waiting: list[bytes] = []
        error: ApiError | None = None
        try:
            try:
                async with working:
                    async for line in upstream.aiter_lines():
                        if not line.startswith("data: ") or line == "data: [DONE]":
                            continue
                        chunk = orjson.loads(line[6:])
                        if "error" in chunk or capture.take(chunk):
                            waiting.append(_event(chunk))
                        if not capture.finished:
                            for event in waiting:
                                events.put_nowait(event)
                            waiting.clear()
            except httpx.TransportError:
                error = _engine_gone(capture.header)
            finally:
                await self._record(capture, failed=error is not None)
        except Exception as broken:
            # Whatever it was, the client must not wait for ever, nor take the answer for a whole one.
            waiting.clear()
            if isinstance(broken, ApiError):
                error = broken
            else:
                log.exception("call %s", capture.header.call_id)
                error = ApiError(f"the server failed on the call{_at(capture.header)}; its log has the details")
        waiting.append(b"data: [DONE]\n\n" if error is None else _event({"error": body_of(error)}))
        for event in waiting:
            events.put_nowait(event)
        events.put_nowait(None)

    async def _record(self, capture: Capture, *, failed: bool = False) -> None:
        if not capture.header.recorded:
            return
        try:
            await asyncio.to_thread(self._calls.save, capture.records(failed=failed))
        except (OSError, SQLAlchemyError) as error:
            log.exception("call %s", capture.header.call_id)
            raise Unavailable(
                f"the call{_at(capture.header)} could not be recorded: is the server's disk full?",
                code="not_recorded",
                retry_after=5,
            ) from error

    async def _refusal(self, upstream: httpx.Response, header: CallHeader, body: dict[str, Any]) -> ApiError:
        """The engine's refusal in our words where we know more than it does."""
        try:
            content = await upstream.aread()
        except httpx.TransportError as error:
            raise _engine_gone(header) from error
        try:
            message = str(orjson.loads(content)["error"]["message"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            message = content.decode(errors="replace")[:500]
        if upstream.status_code == 400 and "context length" in message:
            return await self._context_error(header, body, message)
        if upstream.status_code >= 500:
            return Unavailable(f"the engine failed{_at(header)}: {message}", code="engine_error", retry_after=1)
        refusal = BadRequest(f"the engine refused the call{_at(header)}: {message}", code="engine_refused")
        refusal.status = upstream.status_code
        return refusal

    async def _context_error(self, header: CallHeader, body: dict[str, Any], message: str) -> ApiError:
        limit = self._engine.max_model_len
        answer = await self._ask_tokenizer(header, {"messages": body.get("messages"), "tools": body.get("tools")})
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

    async def _ask_tokenizer(self, header: CallHeader, body: dict[str, Any]) -> httpx.Response:
        # The base model's: no adapter changes it, so none has to be loaded.
        try:
            return await self._engine.http.post("/tokenize", json={**body, "model": self._engine.served_name})
        except httpx.TransportError as error:
            raise _engine_gone(header) from error

    def _opened(self, header: CallHeader) -> _Opened:
        runs = [] if header.run_id is None else [(self._open_runs, header.run_id)]
        return _Opened([(self._open, header.call_id), *runs], self._closed)


class _HeldStream(StreamingResponse):
    """A stream that holds leases until it has ended, also if the client goes away before its first chunk."""

    def __init__(self, content: AsyncIterator[bytes], held: AsyncExitStack, headers: Mapping[str, str]) -> None:
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await super().__call__(scope, receive, send)


class _Opened:
    """Counts a call and its run as open while its record may still come."""

    def __init__(self, entries: Sequence[tuple[dict[str, int], str]], closed: asyncio.Condition) -> None:
        self._entries, self._closed = entries, closed

    async def __aenter__(self) -> None:
        for counts, key in self._entries:
            counts[key] = counts.get(key, 0) + 1

    async def __aexit__(self, *_: object) -> None:
        for counts, key in self._entries:
            counts[key] -= 1
            if not counts[key]:
                del counts[key]
        await asyncio.shield(asyncio.ensure_future(self._notify()))

    async def _notify(self) -> None:
        async with self._closed:
            self._closed.notify_all()


async def _drain(events: asyncio.Queue[bytes | None]) -> AsyncIterator[bytes]:
    while (event := await events.get()) is not None:
        yield event


async def _end(task: asyncio.Task[None]) -> None:
    """End a task, or see it end."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _header(headers: Mapping[str, str]) -> CallHeader:
    retry = headers.get(protocol.HEADER_RETRY, "0")
    node = headers.get(protocol.HEADER_NODE)
    record = headers.get(protocol.HEADER_RECORD)
    if record not in (None, "none"):
        raise BadRequest(f"{protocol.HEADER_RECORD}: {record!r} is not 'none', leave the header out to record the call")
    return CallHeader(
        call_id=headers.get(protocol.HEADER_CALL) or uuid.uuid4().hex,
        attempt=int(retry) if retry.isdecimal() and len(retry) < 6 else 0,
        run_id=headers.get(protocol.HEADER_RUN) or None,
        group_id=headers.get(protocol.HEADER_GROUP) or None,
        node=unquote(node) if node is not None else None,
        recorded=record is None,
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
