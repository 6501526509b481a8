"""A small real HTTP server that speaks OpenAI's chat API, to test the client over the wire without an engine.

Invariant: it answers by what the last message says (``!500``, ``!tool name {...}``, ...) and logs every request it got,
so a test can compare what was recorded with what was sent.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from ..server.stub_engine import QuickServer

VERSION = 7
CONTEXT = 400


@dataclass
class LoggedRequest:
    """One request as it arrived."""

    run: str | None
    group: str | None
    call: str | None
    node: str | None
    attempt: int
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class OpenAIStub:
    """The server and its log."""

    log: list[LoggedRequest] = field(default_factory=list)
    """Chat completions."""
    asked: list[Any] = field(default_factory=list)
    """Bodies of ``/tokenize``, and ``"models"`` for each list of models."""
    url: str = ""

    def of_run(self, run_id: str) -> list[LoggedRequest]:
        return [request for request in self.log if request.run == run_id]

    def start(self) -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(_app(self), log_level="warning", timeout_graceful_shutdown=1)
        self._server = QuickServer(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 10
        while not self._server.started:
            assert time.monotonic() < deadline, "stub did not start"
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        self._server.force_exit = True  # not waiting for clients that keep their connections
        self._thread.join(timeout=10)


def _app(stub: OpenAIStub) -> FastAPI:
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> Response:
        body = await request.json()
        headers = dict(request.headers)
        node = headers.get("x-langgraph-art-node")
        logged = LoggedRequest(
            run=headers.get("x-langgraph-art-run"),
            group=headers.get("x-langgraph-art-group"),
            call=headers.get("x-langgraph-art-call"),
            node=None if node is None else unquote(node),
            attempt=int(headers.get("x-stainless-retry-count", "0")),
            headers=headers,
            body=body,
        )
        stub.log.append(logged)
        return await _answer(logged)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        stub.asked.append("models")
        return {"object": "list", "data": [{"id": "desk", "object": "model", "max_model_len": CONTEXT}]}

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await request.json()
        stub.asked.append(body)
        if "prompt" in body:
            words = body["prompt"].split()
        elif body["messages"][0]["role"] in ("assistant", "tool"):
            return _error(400, "conversations begin with a user", "engine_refused")
        else:
            texts = [_text(message.get("content")) for message in body["messages"]]
            words = ["<bos>", *" ".join(texts).split(), *(tool["function"]["name"] for tool in body.get("tools") or [])]
        ids = [len(word) for word in words]
        return JSONResponse({"count": len(ids), "max_model_len": CONTEXT, "tokens": ids})

    return app


async def _answer(request: LoggedRequest) -> Response:
    body = request.body
    text = _text(body["messages"][-1].get("content"))
    word, _, rest = text.partition(" ")
    if word == "!slow":
        await asyncio.sleep(float(rest))
    if word == "!500" or (word == "!flaky" and request.attempt == 0):
        return _error(500, "engine died", "engine_error")
    if word == "!429":
        return _error(429, "too many requests", "rate_limited")
    if word == "!404":
        return _error(404, f"no policy {body['model']}", "model_not_found")
    if word == "!422":
        return _error(422, "not like this", "invalid")
    if word == "!overflow":
        message = f"node {request.node}: the prompt has 5000 tokens, the context holds 2048"
        return _error(400, message, "context_length_exceeded")
    message: dict[str, Any] = {"role": "assistant", "content": f"re: {text}"}
    finish = "stop"
    if word == "!tool" and body.get("tools"):
        name, _, arguments = rest.partition(" ")
        call = {"id": f"call_{len(text)}", "type": "function", "function": {"name": name, "arguments": arguments}}
        message, finish = {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"
    if word == "!think":
        thought, _, said = rest.partition("|")
        message |= {"reasoning": thought, "content": said}
    if word == "!html":
        return HTMLResponse("<html>a proxy's page</html>")
    if word == "!nochoices":
        head = {"id": "x", "created": 1, "model": "desk", "choices": None}
        if body.get("stream"):
            return StreamingResponse(iter([f"data: {json.dumps(head)}\n\n"]), media_type="text/event-stream")
        return JSONResponse(head)
    if word == "!cut":
        finish = "length"
        if body.get("tools") and body.get("tool_choice") not in (None, "auto", "none"):
            name = body["tools"][0]["function"]["name"]
            function = {"name": name, "arguments": rest}
            message = {"role": "assistant", "content": None, "tool_calls": [{"id": "call_cut", "type": "function"}]}
            message["tool_calls"][0]["function"] = function
    if word in ("!json", "!cut") and "tool_calls" not in message:
        message["content"] = rest
    head = {"id": f"chatcmpl-{request.call}", "created": 1, "model": f"{body['model']}@{VERSION}"}
    prompt = sum(len(_text(m.get("content")).split()) for m in body["messages"])
    answer = len(_text(message["content"]).split())
    usage = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
    if body.get("stream"):
        pause = 0.05 if word == "!paced" else 0.0
        with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        chunks = _chunks(head, message, finish, usage if with_usage else None, pause, drop=word == "!drop")
        return StreamingResponse(chunks, media_type="text/event-stream")
    choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    return JSONResponse({**head, "object": "chat.completion", "choices": [choice], "usage": usage})


async def _chunks(
    head: dict[str, Any],
    message: dict[str, Any],
    finish: str,
    usage: dict[str, int] | None,
    pause: float,
    *,
    drop: bool,
) -> AsyncIterator[str]:
    def event(delta: dict[str, Any], finish: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        data = {**head, "object": "chat.completion.chunk", "choices": [choice]}
        return f"data: {json.dumps(data)}\n\n"

    yield event({"role": "assistant", "content": ""})
    for part in message.get("reasoning", "").split():
        yield event({"reasoning": part + " "})
    for part in (message["content"] or "").split(" ") if message["content"] else []:
        await asyncio.sleep(pause)
        yield event({"content": part + " "})
        if drop:
            raise ConnectionError("the stub breaks the stream off")
    for index, call in enumerate(message.get("tool_calls") or []):
        yield event({"tool_calls": [{"index": index, **call}]})
    yield event({}, finish)
    if usage is not None:
        data = {**head, "object": "chat.completion.chunk", "choices": [], "usage": usage}
        yield f"data: {json.dumps(data)}\n\n"
    yield "data: [DONE]\n\n"


def _error(status: int, message: str, code: str) -> JSONResponse:
    error = {"message": message, "type": "error", "code": code, "param": None}
    return JSONResponse({"error": error}, status_code=status)


def _text(content: Any) -> str:
    if isinstance(content, list):
        return " ".join(part.get("text", "") for part in content)
    return content or ""
