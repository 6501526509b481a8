"""An engine that computes nothing: vLLM's wire format at a set pace, so that only what stands before it is measured.

    python benchmarks/paced_engine.py --port 8001 --interval 0.05 --chunks 40

Each stream sends one chunk of one token every ``--interval`` seconds, with the time it was sent at (``sent``, in
nanoseconds of the system's monotonic clock). Plain asyncio, so that it costs little beside what is measured.
"""

from __future__ import annotations

import asyncio
import json
import time

import typer

PROMPT_TOKENS = 256
VOCABULARY_PROBE = "out of vocabulary"


class PacedEngine:
    """The server.

    Args:
        interval: Seconds between two chunks of a stream.
        chunks: Chunks of a stream.
        vocabulary: Token ids from here on are refused.
    """

    def __init__(self, interval: float, chunks: int, vocabulary: int) -> None:
        self._interval = interval
        self._chunks = chunks
        self._vocabulary = vocabulary
        self._prompt = json.dumps(list(range(PROMPT_TOKENS)))

    async def serve(self, port: int) -> None:
        """Serve for ever."""
        server = await asyncio.start_server(self._connection, "127.0.0.1", port, backlog=4096)
        async with server:
            await server.serve_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                request, *headers = head.decode().split("\r\n")
                length = next((int(h.split(":")[1]) for h in headers if h.lower().startswith("content-length")), 0)
                body = json.loads(await reader.readexactly(length) or b"{}")
                path = request.split()[1]
                if path == "/v1/chat/completions":
                    await self._stream(writer)
                elif path == "/v1/completions":
                    await self._complete(writer, body)
                elif path == "/v1/models":
                    await _json(writer, {"data": [{"id": "paced", "root": "paced", "max_model_len": 4096}]})
                else:
                    await _json(writer, {"error": {"message": "No adapter found for probe"}}, "404 Not Found")
        except (asyncio.IncompleteReadError, ConnectionResetError):
            pass
        finally:
            writer.close()

    async def _complete(self, writer: asyncio.StreamWriter, body: dict[str, object]) -> None:
        prompt = body.get("prompt")
        assert isinstance(prompt, list)
        if max(prompt) >= self._vocabulary:
            await _json(writer, {"error": {"message": VOCABULARY_PROBE}}, "400 Bad Request")
            return
        top = -1.0 if body.get("temperature", 1) == 1 else -2.0
        await _json(writer, {"choices": [{"index": 0, "text": "w", "logprobs": {"top_logprobs": [{"w": top}]}}]})

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        first = f'"prompt_token_ids":{self._prompt},'
        role = '{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}'
        _send(writer, _event(f"{first}{_choices(role)}"))
        begun = time.monotonic()
        for place in range(self._chunks):
            await asyncio.sleep(max(0.0, begun + (place + 1) * self._interval - time.monotonic()))
            finish = '"stop"' if place == self._chunks - 1 else "null"
            choice = (
                '{"index":0,"delta":{"content":" word"},"logprobs":{"content":[{"token":" word","logprob":-1.2345678,'
                f'"bytes":null,"top_logprobs":[]}}]}},"finish_reason":{finish},"token_ids":[{place}]}}'
            )
            _send(writer, _event(_choices(choice)))
            await writer.drain()
        usage = f'"usage":{{"prompt_tokens":{PROMPT_TOKENS},"completion_tokens":{self._chunks},"total_tokens":0}}'
        _send(writer, _event(f'"choices":[],{usage}'))
        _send(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def _choices(choice: str) -> str:
    return f'"choices":[{choice}]'


def _event(fields: str) -> bytes:
    head = (
        f'"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"paced","sent":{time.monotonic_ns()}'
    )
    return f"data: {{{head},{fields}}}\n\n".encode()


def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


async def _json(writer: asyncio.StreamWriter, content: object, status: str = "200 OK") -> None:
    data = json.dumps(content).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()


def main(port: int = 8001, interval: float = 0.05, chunks: int = 40, vocabulary: int = 49152) -> None:
    """Serve paced streams on this machine."""
    asyncio.run(PacedEngine(interval, chunks, vocabulary).serve(port))


if __name__ == "__main__":
    typer.run(main)
