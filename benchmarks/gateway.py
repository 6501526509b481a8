"""What the gateway costs: throughput, latency and CPU beside the engine alone, and thousands of open streams.

    python benchmarks/gateway.py [--streams 32] [--open-streams 2000]

The engine is `paced_engine.py`, a process of its own at 20 chunks a second and stream; the gateway is the real server
with recording on, pointed at it with ``--engine-url``. Latency is from the moment a chunk leaves the engine (written
into the chunk) to the moment the client has it, each chunk, through the gateway minus without it. Direct and gateway
rounds alternate; figures are medians over rounds.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import psutil
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import describe
from langgraph_art import EmbeddedServer

PACED = Path(__file__).with_name("paced_engine.py")


@dataclass
class Round:
    """What the clients saw."""

    seconds: float = 0.0
    chunks: int = 0
    errors: int = 0
    delays_ms: list[float] = field(default_factory=list)


async def stream(port: int, model: str, result: Round, call: int) -> None:
    """Read one stream to its end."""
    body = json.dumps({"model": model, "stream": True, "messages": [{"role": "user", "content": "hello " * 200}]})
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        f"x-langgraph-art-call: {os.getpid()}-{call}-{time.monotonic_ns()}\r\nconnection: close\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        writer.write((head + body).encode())
        finished = False
        async for line in reader:
            if line.startswith(b"data: {"):
                now = time.monotonic_ns()
                result.delays_ms.append((now - int(line.split(b'"sent":', 1)[1].split(b",", 1)[0])) / 1e6)
                result.chunks += b'"content":" word"' in line
            if line.startswith(b"data: [DONE]"):
                finished = True
                break
        writer.close()
        result.errors += not finished
    except (OSError, IndexError, ValueError):
        result.errors += 1


async def clients(port: int, model: str, streams: int, ramp: float = 0.0) -> Round:
    """Read ``streams`` streams at once, begun over ``ramp`` seconds."""
    result = Round()
    begun = time.monotonic()

    async def one(index: int) -> None:
        await asyncio.sleep(ramp * index / streams)
        await stream(port, model, result, index)

    await asyncio.gather(*[one(index) for index in range(streams)])
    result.seconds = time.monotonic() - begun
    return result


@contextmanager
def paced(interval: float, chunks: int) -> Iterator[int]:
    """A paced engine; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, str(PACED), f"--port={port}", f"--interval={interval}", f"--chunks={chunks}"]
    )
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


@contextmanager
def gateway(engine_port: int) -> Iterator[tuple[int, psutil.Process]]:
    """The real server in front of an engine; yields its port and its process."""
    with (
        tempfile.TemporaryDirectory() as directory,
        EmbeddedServer(
            data_dir=directory, port=0, engine_url=f"http://127.0.0.1:{engine_port}", device="cpu", progress=False
        ) as server,
    ):
        port = int(server.url.rsplit(":", 1)[1])
        (process,) = [
            child
            for child in psutil.Process().children(recursive=True)
            if any(c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in child.net_connections())
        ]
        # The trainer loads its model beside the first calls; it is no part of this.
        time.sleep(15)
        yield port, process


def quantile(values: list[float], share: float) -> float:
    """The value below which ``share`` of the values lie."""
    return sorted(values)[int(share * (len(values) - 1))]


def main(
    streams: Annotated[int, typer.Option(help="Streams at once, at 20 chunks a second each.")] = 32,
    chunks: Annotated[int, typer.Option(help="Chunks of each stream.")] = 100,
    rounds: Annotated[int, typer.Option(help="Rounds of each kind.")] = 5,
    open_streams: Annotated[int, typer.Option(help="Streams at once, at a chunk in two seconds each.")] = 2000,
) -> None:
    """Measure the gateway against the engine alone."""
    model = "smollm2-135m-instruct"
    direct: list[Round] = []
    through: list[Round] = []
    cpu: list[float] = []
    with paced(0.05, chunks) as engine_port, gateway(engine_port) as (port, process):
        asyncio.run(clients(port, model, streams))  # fills caches
        for number in range(rounds):
            direct.append(asyncio.run(clients(engine_port, model, streams)))
            before = process.cpu_times()
            through.append(asyncio.run(clients(port, model, streams)))
            after = process.cpu_times()
            used = after.user + after.system - before.user - before.system
            cpu.append(used * 1e6 / through[-1].chunks)
            print(f"round {number + 1}: {direct[-1].seconds:.2f} s direct, {through[-1].seconds:.2f} s through")
    with paced(2.0, 10) as engine_port, gateway(engine_port) as (port, process):
        peak = 0

        async def watch() -> Round:
            nonlocal peak
            work = asyncio.ensure_future(clients(port, model, open_streams, ramp=10.0))
            while not work.done():
                peak = max(peak, process.memory_info().rss)
                await asyncio.sleep(0.5)
            return await work

        many = asyncio.run(watch())

    def rate(done: list[Round]) -> float:
        return statistics.median(each.chunks / each.seconds for each in done)

    def added(share: float) -> float:
        pairs = zip(through, direct, strict=True)
        return statistics.median(quantile(t.delays_ms, share) - quantile(d.delays_ms, share) for t, d in pairs)

    print(
        json.dumps(
            {
                "machine": describe(),
                "rounds": rounds,
                "throughput_vs_engine": round(rate(through) / rate(direct), 4),
                "added_ms_p50": round(added(0.5), 3),
                "added_ms_p99": round(added(0.99), 3),
                "cpu_us_per_chunk": round(statistics.median(cpu), 1),
                "errors_32": sum(each.errors for each in through),
                "streams": open_streams,
                "errors": many.errors,
                "chunks": many.chunks,
                "peak_rss_mb": round(peak / 2**20),
            }
        )
    )


if __name__ == "__main__":
    typer.run(main)
