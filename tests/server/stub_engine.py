"""A small real HTTP server that speaks vLLM's wire format as the server uses it, to test what stands around the engine.

Invariant: like vLLM it gives ids, logprobs and usage only to those who ask, answers 404 for a model that is not loaded
and refuses a name that is loaded already; so a test passes only if the server asks right. A test says with ``Answer``
how the next call goes. It runs in the test's own event loop, or as a program in vLLM's place (``--port``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import uvicorn

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

BEFORE = -1
"""The point before anything is sent, for ``Answer.wait_at`` and ``Answer.die_at``; 0 is after the headers."""
PIECE = "w "
"""The text of every sampled token."""


@dataclass
class Answer:
    """How one chat completion goes. Points count the stream's events; the first one holds the role, no token."""

    ids: Sequence[int] = (11, 12, 13, 14)
    piece: str = PIECE
    tool_calls: Sequence[tuple[str, str]] = ()
    """Name and arguments of each, in place of content; streamed in pieces, some tokens without any."""
    reasoning: int = 0
    """So many of the first tokens are thoughts."""
    loses: Literal["id", "logprob", "usage", "prompt", None] = None
    """What it forgets one of: an id, a logprob, the usage, or a token of the prompt."""
    status: int = 200
    """Anything else is an error answer with ``message``."""
    message: str = "told to fail"
    wait_at: int | None = None
    """Where it waits for ``go``."""
    die_at: int | None = None
    """Where it closes the socket, as a dying process does."""
    garble_at: int | None = None
    """Where it sends half an event."""
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    """It is at ``wait_at``."""
    go: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    """The caller hung up before the end."""


@dataclass
class Logged:
    """One request as it arrived, and the status it was given."""

    path: str
    body: dict[str, Any]
    status: int = 0


def logprob(token: int) -> float:
    """What the stub reports for a token: exact in float32, another for each."""
    return -token / 16


def prompt_ids(messages: list[dict[str, Any]]) -> list[int]:
    """The stub's tokenizer: one id of 3 to 22 for each word."""
    words = " ".join(str(message.get("content")) for message in messages).split()
    return [1, *(sum(word.encode()) % 20 + 3 for word in words)]


def text_ids(text: str) -> list[int]:
    """The stub's tokenizer for plain text: one id below 50 for each letter."""
    return [ord(letter) % 50 for letter in text]


def text_of(tokens: Sequence[int]) -> str:
    """The text of tokens."""
    return " ".join(f"<{token}>" for token in tokens)


class StubEngine:
    """The server's state and its ASGI application.

    Args:
        name: Served name of the base model.
        max_model_len: Context length in tokens.
        refuse_first: So many requests are answered 503, as by a server that listens but is not ready.
        vocabulary: Number of token ids; others are refused.
        takes_adapters: Whether adapters can be loaded at run time.
        raw_logprobs: Whether logprobs leave the temperature out.
    """

    def __init__(
        self,
        name: str = "tiny",
        max_model_len: int = 64,
        refuse_first: int = 0,
        *,
        vocabulary: int = 64,
        takes_adapters: bool = True,
        raw_logprobs: bool = False,
    ) -> None:
        self.name = name
        self.max_model_len = max_model_len
        self.url = ""
        self.requests: list[Logged] = []
        self.adapters: dict[str, str] = {}
        """Loaded adapters: directory by name."""
        self.refuse_loads: deque[tuple[int, str]] = deque()
        """Status and message for the next loads; ``{path}`` stands for the directory."""
        self.asleep = False
        self.wakes = True
        """Whether it wakes up when told to."""
        self.computing = 0
        """Chat completions in work now."""
        self._refuse_first = refuse_first
        self._vocabulary = vocabulary
        self._takes_adapters = takes_adapters
        self._raw_logprobs = raw_logprobs
        self._answers: deque[Answer] = deque()
        self._waiting: list[Answer] = []

    def next(self, answer: Answer) -> Answer:
        """Say how the next unplanned chat completion goes; without a plan it is ``Answer()``."""
        self._answers.append(answer)
        return answer

    def bodies(self, path: str) -> list[dict[str, Any]]:
        """What was asked at a path, in order."""
        return [request.body for request in self.requests if request.path == path]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[StubEngine]:
        """Serve in this event loop."""
        async with serving(self) as self.url:
            yield self
            for answer in self._waiting:
                answer.go.set()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """The ASGI application."""
        content, more = b"", True
        while more:
            message = await receive()
            content, more = content + message.get("body", b""), message.get("more_body", False)
        logged = Logged(scope["path"], json.loads(content or b"{}"))
        self.requests.append(logged)

        async def noted(message: MutableMapping[str, Any]) -> None:
            logged.status = message.get("status", logged.status)
            await send(message)

        if self._refuse_first > 0:
            self._refuse_first -= 1
            await _error(noted, 503, "not yet")
            return
        match logged.path:
            case "/v1/chat/completions":
                await self._chat(logged.body, receive, noted)
            case "/v1/completions":
                await self._complete(logged.body, noted)
            case "/detokenize":
                await _json(noted, {"prompt": text_of(logged.body["tokens"])})
            case "/v1/models":
                card = {"id": self.name, "root": "/models/" + self.name, "max_model_len": self.max_model_len}
                adapters = [{"id": name, "parent": self.name} for name in self.adapters]
                await _json(noted, {"object": "list", "data": [card, *adapters]})
            case path if path.endswith("_lora_adapter") and not self._takes_adapters:
                await _json(noted, {"detail": "Not Found"}, 404)
            case "/tokenize":
                if logged.body["model"] != self.name:
                    await _error(noted, 404, f"The model `{logged.body['model']}` does not exist.")
                    return
                if logged.body.get("messages") == []:
                    await _error(noted, 400, "the chat template failed")
                    return
                ids = (
                    text_ids(logged.body["prompt"]) if "prompt" in logged.body else prompt_ids(logged.body["messages"])
                )
                await _json(noted, {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids})
            case "/v1/load_lora_adapter":
                await self._load(logged.body["lora_name"], logged.body["lora_path"], noted)
            case "/v1/unload_lora_adapter":
                await self._unload(logged.body["lora_name"], noted)
            case "/sleep":
                self.asleep = True
                await _json(noted, {"status": "sleeping"})
            case "/wake_up":
                self.asleep = self.asleep and not self.wakes
                await _json(noted, {}, 200 if self.wakes else 500)
            case "/is_sleeping":
                await _json(noted, {"is_sleeping": self.asleep})
            case "/requests":
                await _json(noted, [[request.path, request.status] for request in self.requests])
            case _:
                await _error(noted, 404, "Not Found")

    async def _complete(self, body: dict[str, Any], send: Send) -> None:
        if not all(0 <= token < self._vocabulary for token in body["prompt"]):
            await _error(send, 400, f"token id {max(body['prompt'])} is out of vocabulary")
            return
        choice: dict[str, Any] = {"index": 0, "text": "w"}
        if body.get("logprobs"):
            top = -2.0 if self._raw_logprobs or body.get("temperature", 1) <= 1 else -2.5
            choice["logprobs"] = {"top_logprobs": [{PIECE: top}]}
        await _json(send, {"object": "text_completion", "choices": [choice]})

    async def _load(self, name: str, path: str, send: Send) -> None:
        if self.refuse_loads:
            status, message = self.refuse_loads.popleft()
            await _error(send, status, message.format(path=path))
        elif name in self.adapters:
            await _error(send, 400, f"The lora adapter '{name}' has already been loaded.")
        elif not (Path(path) / "adapter_config.json").exists():
            await _error(send, 404, f"Loading lora {name} failed: No adapter found for {path}")
        else:
            self.adapters[name] = path
            await _json(send, f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, name: str, send: Send) -> None:
        if self.adapters.pop(name, None) is None:
            await _error(send, 404, f"The lora adapter '{name}' cannot be found.")
        else:
            await _json(send, f"Success: LoRA adapter '{name}' removed successfully.")

    async def _chat(self, body: dict[str, Any], receive: Receive, send: Send) -> None:
        if body["model"] not in {self.name, *self.adapters}:
            await _error(send, 404, f"The model `{body['model']}` does not exist.")
            return
        prompt = prompt_ids(body["messages"])
        if len(prompt) >= self.max_model_len:
            limit = f"This model's maximum context length is {self.max_model_len} tokens."
            await _error(send, 400, f"{limit} However, your request has {len(prompt)} input tokens.")
            return
        answer = self._answers.popleft() if self._answers else Answer()
        self._waiting.append(answer)
        self.computing += 1
        work = asyncio.ensure_future(self._answer(body, prompt, answer, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            elif answer.die_at is None:
                answer.aborted.set()
        finally:
            self.computing -= 1
            work.cancel()
            gone.cancel()

    async def _answer(
        self, body: dict[str, Any], prompt: list[int], answer: Answer, receive: Receive, send: Send
    ) -> None:
        async def at(point: int) -> None:
            if answer.wait_at == point:
                answer.reached.set()
                await answer.go.wait()
            if answer.die_at == point:
                # uvicorn's receive is a method of the object that holds the connection.
                receive.__self__.transport.abort()  # type: ignore[attr-defined]
                await asyncio.Event().wait()

        await at(BEFORE)
        if answer.status != 200:
            await _error(send, answer.status, answer.message)
            return
        kind = b"text/event-stream" if body.get("stream") else b"application/json"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        if not body.get("stream"):
            await at(0)
            content = json.dumps(self._whole(body, prompt, answer)).encode()
            await send({"type": "http.response.body", "body": content})
            return
        for point, event in enumerate([*self._events(body, prompt, answer), None]):
            await at(point)
            data = b"[DONE]" if event is None else json.dumps(event).encode()
            data = data[:20] if answer.garble_at == point else data
            await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def _ids(self, body: dict[str, Any], prompt: list[int], answer: Answer) -> tuple[list[int], str]:
        asked = body.get("max_completion_tokens") or body.get("max_tokens") or self.max_model_len
        limit = min(asked, max(self.max_model_len - len(prompt), len(answer.ids)))
        end = "tool_calls" if answer.tool_calls else "stop"
        return list(answer.ids[:limit]), end if len(answer.ids) <= limit else "length"

    def _head(self, body: dict[str, Any], kind: str) -> dict[str, Any]:
        return {"id": "chatcmpl-stub", "object": kind, "created": 1, "model": body["model"]}

    def _whole(self, body: dict[str, Any], prompt: list[int], answer: Answer) -> dict[str, Any]:
        ids, finish = self._ids(body, prompt, answer)
        choices = [
            {
                "index": index,
                "message": _message(answer, len(ids)),
                "logprobs": _logprobs(body, ids[1:] if answer.loses == "logprob" else ids),
                "finish_reason": finish,
                "stop_reason": None,
                "token_ids": _shown(body, ids[1:] if answer.loses == "id" else ids),
            }
            for index in range(body.get("n") or 1)
        ]
        usage = {} if answer.loses == "usage" else {"usage": _usage(prompt, len(ids) * len(choices))}
        return {
            **self._head(body, "chat.completion"),
            "choices": choices,
            **usage,
            "prompt_token_ids": _shown(body, prompt[1:] if answer.loses == "prompt" else prompt),
        }

    def _events(self, body: dict[str, Any], prompt: list[int], answer: Answer) -> list[dict[str, Any]]:
        ids, finish = self._ids(body, prompt, answer)
        head = self._head(body, "chat.completion.chunk")
        choices = range(body.get("n") or 1)
        events: list[dict[str, Any]] = []
        for index in choices:
            role = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            events.append({**head, "choices": [role]})
            events[-1]["prompt_token_ids"] = _shown(body, prompt[1:] if answer.loses == "prompt" else prompt)
        deltas = _deltas(answer, len(ids))
        for place, token in enumerate(ids):
            for index in choices:
                choice = {
                    "index": index,
                    "delta": deltas[place],
                    "logprobs": _logprobs(body, [] if answer.loses == "logprob" and not place else [token]),
                    "finish_reason": finish if place == len(ids) - 1 else None,
                    "token_ids": _shown(body, [] if answer.loses == "id" and not place else [token]),
                }
                events.append({**head, "choices": [choice]})
        if (body.get("stream_options") or {}).get("include_usage") and answer.loses != "usage":
            events.append({**head, "choices": [], "usage": _usage(prompt, len(ids) * len(choices))})
        return events


class QuickServer(uvicorn.Server):
    """As uvicorn's, which looks ten times a second whether it is to end: that adds up over a thousand tests."""

    async def main_loop(self) -> None:
        while not self.should_exit:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """Serve an ASGI application over real HTTP in this event loop; yields its address."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    config = uvicorn.Config(app, lifespan="off", log_level="critical", proxy_headers=False)
    server = QuickServer(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    async with asyncio.timeout(10):
        while not server.started:
            await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        await task


def _usage(prompt: list[int], sampled: int) -> dict[str, int]:
    return {"prompt_tokens": len(prompt), "completion_tokens": sampled, "total_tokens": len(prompt) + sampled}


def _message(answer: Answer, sampled: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.piece * (sampled - answer.reasoning)}
    if answer.reasoning:
        message["reasoning"] = answer.piece * answer.reasoning
    if answer.tool_calls:
        message |= {"content": None, "tool_calls": [_tool_call(*call) for call in answer.tool_calls]}
    return message


def _deltas(answer: Answer, sampled: int) -> list[dict[str, Any]]:
    """What each token adds to the message; the parser of tool calls holds some back and then gives several."""
    if not answer.tool_calls:
        return [{"reasoning" if place < answer.reasoning else "content": answer.piece} for place in range(sampled)]
    pieces: list[dict[str, Any]] = []
    for index, (name, arguments) in enumerate(answer.tool_calls):
        pieces.append({"index": index, **_tool_call(name, "")})
        middle = len(arguments) // 2
        for part in (arguments[:middle], arguments[middle:]):
            pieces.append({"index": index, "function": {"arguments": part}})
    held = sampled // 2
    parts = [pieces[place - held : place - held + 1] for place in range(held, sampled)]
    parts[-1] += pieces[sampled - held :]
    return [{} for _ in range(held)] + [{"tool_calls": part} for part in parts]


def _tool_call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _shown(body: dict[str, Any], ids: list[int]) -> list[int] | None:
    """Ids as vLLM gives them: if asked for, and not to those who do not want to see the thoughts."""
    return ids if body.get("return_token_ids") and body.get("include_reasoning") is not False else None


def _logprobs(body: dict[str, Any], ids: list[int]) -> dict[str, Any] | None:
    if not body.get("logprobs"):
        return None
    return {
        "content": [{"token": PIECE, "logprob": logprob(token), "bytes": None, "top_logprobs": []} for token in ids]
    }


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _json(send: Send, content: Any, status: int = 200) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})


async def _error(send: Send, status: int, message: str) -> None:
    await _json(send, {"error": {"message": message, "type": "Error", "param": None, "code": status}}, status)


def main() -> None:
    """The stub as a program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--refuse-first", type=int, default=0)
    parser.add_argument("--environment", type=Path, help="file to write the environment to")
    parser.add_argument("--die", type=int, metavar="CODE", help="print a failure and end with this exit code")
    parser.add_argument("--silent", action="store_true", help="never listen")
    parser.add_argument("--say", nargs="*", default=[], help="lines for the log")
    parser.add_argument("--never-wake", action="store_true", help="fail to wake up")
    options = parser.parse_args()
    if options.environment:
        options.environment.write_text(json.dumps(dict(os.environ)))
    if options.die is not None:
        print("(EngineCore pid=7) ValueError: the cause of it all", file=sys.stderr)
        print("(APIServer pid=6) RuntimeError: Engine core initialization failed", file=sys.stderr)
        sys.exit(options.die)
    print("\n".join(options.say), flush=True)
    if options.silent:
        time.sleep(600)
    app = StubEngine(refuse_first=options.refuse_first)
    app.wakes = not options.never_wake
    uvicorn.run(app, host="127.0.0.1", port=options.port, lifespan="off", log_level="error", proxy_headers=False)


if __name__ == "__main__":
    main()
