"""From an optimizer step to the first token of the new version, with clients calling all the while.

    python benchmarks/swap.py [--swaps 5] [--clients 8]

A real server on the small model trains one policy ``--swaps`` times on rollouts of a one-node graph. Meanwhile clients
stream from the plain policy name without a pause. ``swap_seconds`` is the time from the moment the new weights were
written, right after the optimizer's step, to the first token that a client got from that version.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from langgraph.graph import END, START, StateGraph
from openai import OpenAI

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import describe
from langgraph_art import ChatART, Client, EmbeddedServer, rollout
from langgraph_art.protocol import HEADER_VERSION

QUESTIONS = ["Name a river.", "Name a colour.", "Name a city.", "Name a metal."]


class Load:
    """Clients that stream from a policy until told to stop."""

    def __init__(self, url: str, clients: int) -> None:
        self._client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
        self._stop = threading.Event()
        self.first_token: dict[str, float] = {}
        """Wall clock of the first token, by version."""
        self.calls = 0
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                answer = self._client.chat.completions.with_raw_response.create(
                    model="swapped",
                    messages=[{"role": "user", "content": QUESTIONS[0]}],
                    max_tokens=8,
                    stream=True,
                )
                for chunk in answer.parse():
                    if chunk.choices and chunk.choices[0].delta.content:
                        self.first_token.setdefault(answer.headers[HEADER_VERSION], time.time())
                self.calls += 1
            except Exception as error:  # whatever a client gets is a failure of the swap
                self.failures.append(f"{type(error).__name__}: {error}")


def graph(url: str) -> Any:
    """One node that asks the policy."""
    llm = ChatART(model="swapped", base_url=f"{url}/v1", max_tokens=8)
    builder = StateGraph(dict)
    builder.add_node("answer", lambda state: {"text": llm.invoke(state["question"]).content})
    builder.add_edge(START, "answer")
    builder.add_edge("answer", END)
    return builder.compile()


def main(
    swaps: Annotated[int, typer.Option(help="Versions to train.")] = 5,
    clients: Annotated[int, typer.Option(help="Clients that call all the while.")] = 8,
) -> None:
    """Measure how soon a new version serves."""
    waits: list[float] = []
    with (
        tempfile.TemporaryDirectory() as directory,
        EmbeddedServer(data_dir=directory, port=0, max_model_len=512, policies=["swapped"], progress=False) as server,
        Client(server.url) as client,
    ):
        asked = [{"question": question} for question in QUESTIONS]
        with Load(server.url, clients) as load:
            for swap in range(1, swaps + 1):
                groups = rollout(graph(server.url), asked, n=4, progress=False)
                for group in groups:
                    for rank, run in enumerate(group.runs):
                        run.reward = float(rank)
                client.train(groups)
                deadline = time.monotonic() + 60
                while f"swapped@{swap}" not in load.first_token and time.monotonic() < deadline:
                    time.sleep(0.05)
                (weights,) = Path(directory).glob(f"checkpoints/swapped/{swap}-*/adapter_model.safetensors")
                waits.append(load.first_token[f"swapped@{swap}"] - weights.stat().st_mtime)
                print(f"swapped@{swap}: {waits[-1]:.2f} s")
    print(
        json.dumps(
            {
                "machine": describe(),
                "swaps": swaps,
                "clients": clients,
                "swap_seconds": round(statistics.median(waits), 3),
                "swap_seconds_max": round(max(waits), 3),
                "calls": load.calls,
                "failures": len(load.failures),
                "first_failure": load.failures[0] if load.failures else None,
            }
        )
    )


if __name__ == "__main__":
    typer.run(main)
