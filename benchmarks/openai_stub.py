"""A process that answers chat completions as fast as it can, so that a benchmark measures its client.

    python benchmarks/openai_stub.py

Prints its URL and serves until its standard input closes. The answer is always the same, whole or streamed.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

ANSWER = "The Nile is the longest river of Africa. It flows north through eleven countries into the Mediterranean."
_HEAD = {"id": "chatcmpl-1", "created": 1, "model": "desk@7"}
_USAGE = {"prompt_tokens": 40, "completion_tokens": 20, "total_tokens": 60}


def _whole() -> bytes:
    message = {"role": "assistant", "content": ANSWER}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    body = json.dumps({**_HEAD, "object": "chat.completion", "choices": [choice], "usage": _USAGE}).encode()
    return _headers("application/json", len(body)) + body


def _streamed() -> bytes:
    deltas = [{"role": "assistant", "content": ""}, *({"content": f"{word} "} for word in ANSWER.split())]
    choices = [[{"index": 0, "delta": delta, "finish_reason": None}] for delta in deltas]
    chunks: list[dict[str, object]] = [{"choices": choice} for choice in choices]
    chunks += [
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": _USAGE},
    ]
    events = [json.dumps({**_HEAD, "object": "chat.completion.chunk", **chunk}) for chunk in chunks]
    body = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()
    return _headers("text/event-stream", len(body)) + body


def _headers(kind: str, length: int) -> bytes:
    return f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n".encode()


class _Connection(asyncio.Protocol):
    whole, streamed = _whole(), _streamed()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._received = transport, b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        if len(body) < int(fields.get(b"content-length", 0)):
            return
        self._received = b""  # a client sends its next request after the answer
        self._transport.write(self.streamed if b'"stream":true' in body else self.whole)


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Connection, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


@contextmanager
def running() -> Iterator[str]:
    """The stub as a process of its own; yields its URL."""
    command = [sys.executable, __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


if __name__ == "__main__":
    asyncio.run(_serve())
