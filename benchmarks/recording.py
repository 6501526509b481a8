"""What recording costs: CPU time of a client process, ChatART in a recording against plain ChatOpenAI.

    python benchmarks/recording.py [--calls 200] [--repetitions 9]

Both call the same stub, which is a process of its own, from one node of the same graph; runs of the two alternate, and
medians over the repetitions are compared. ``cpu_ratio_vs_chatopenai`` is the worse of sync and async calls,
``cpu_growth_per_call`` the CPU time of a late call of a long run over that of an early one, prompts of equal length.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

from benchmarks.machine import describe
from benchmarks.openai_stub import ANSWER, running
from langgraph_art import ChatART, record

LOOP = asyncio.Runner()  # one for all: plain ChatOpenAI keeps its connections when a loop ends, and fails in the next
PROMPT: list[BaseMessage] = [SystemMessage("You answer in one sentence."), HumanMessage("Where is the Nile?")]
HISTORY = [*PROMPT, *[AIMessage(ANSWER, id=f"a{n}") if n % 2 else HumanMessage("And then?") for n in range(1, 201)]]


def main(
    calls: Annotated[int, typer.Option(help="Calls in each run.")] = 200,
    repetitions: Annotated[int, typer.Option(help="Runs of each kind.")] = 9,
) -> None:
    """Compare the CPU time of recorded calls with that of plain ones."""
    with running() as url:
        os.environ["LANGGRAPH_ART_URL"] = url
        plain = ChatOpenAI(model="desk", base_url=f"{url}/v1", api_key="none", stream_usage=True)
        ours = ChatART(model="desk")
        ratios = {name: _ratio(way, plain, ours, PROMPT, calls, repetitions) for name, way in WAYS.items()}
        long = _ratio(_invoke, plain, ours, HISTORY, max(calls // 10, 1), repetitions)
        growth = statistics.median(_growth(ours, calls) for _ in range(repetitions))
    found = {
        "machine": describe(),
        "calls": calls,
        "repetitions": repetitions,
        "cpu_ms_per_call": {
            name: {"chatopenai": round(before, 3), "recorded": round(after, 3)}
            for name, (before, after) in ratios.items()
        },
        "cpu_ratio": {name: round(after / before, 3) for name, (before, after) in ratios.items()},
        "cpu_ratio_200_messages": round(long[1] / long[0], 3),
        "cpu_growth_per_call": round(growth, 3),
        "cpu_ratio_vs_chatopenai": round(max(ratios[name][1] / ratios[name][0] for name in ("sync", "async")), 3),
    }
    print(json.dumps(found))


def _invoke(model: ChatOpenAI, prompt: list[BaseMessage]) -> Any:
    return model.invoke(prompt)


async def _ainvoke(model: ChatOpenAI, prompt: list[BaseMessage]) -> Any:
    return await model.ainvoke(prompt)


def _stream(model: ChatOpenAI, prompt: list[BaseMessage]) -> Any:
    for chunk in model.stream(prompt):
        last = chunk
    return last


async def _astream(model: ChatOpenAI, prompt: list[BaseMessage]) -> Any:
    async for chunk in model.astream(prompt):
        last = chunk
    return last


WAYS: dict[str, Callable[[ChatOpenAI, list[BaseMessage]], Any]] = {
    "sync": _invoke,
    "async": _ainvoke,
    "stream": _stream,
    "astream": _astream,
}


def _ratio(
    way: Callable[[ChatOpenAI, list[BaseMessage]], Any],
    plain: ChatOpenAI,
    ours: ChatOpenAI,
    prompt: list[BaseMessage],
    calls: int,
    repetitions: int,
) -> tuple[float, float]:
    """CPU milliseconds of a plain and of a recorded call: medians of runs in turn, after one that warms up."""
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(repetitions + 1):
        found[0].append(_run(way, plain, prompt, calls, recorded=False)[-1] / calls)
        found[1].append(_run(way, ours, prompt, calls, recorded=True)[-1] / calls)
    return statistics.median(found[0][1:]), statistics.median(found[1][1:])


def _growth(ours: ChatOpenAI, calls: int) -> float:
    """CPU time of the last quarter of the calls of one run over that of the second."""
    times = _run(_invoke, ours, PROMPT, calls, recorded=True)
    quarter = max(calls // 4, 1)
    return (times[-1] - times[-1 - quarter]) / (times[2 * quarter - 1] - times[quarter - 1])


def _run(
    way: Callable[[ChatOpenAI, list[BaseMessage]], Any],
    model: ChatOpenAI,
    prompt: list[BaseMessage],
    calls: int,
    *,
    recorded: bool,
) -> list[float]:
    """CPU milliseconds that this process has used after each call of one graph run, counted from its first node."""
    times: list[float] = []

    def talk(state: MessagesState) -> dict[str, Any]:
        start = time.process_time()
        for _ in range(calls):
            way(model, prompt)
            times.append(1e3 * (time.process_time() - start))
        return {}

    async def atalk(state: MessagesState) -> dict[str, Any]:
        start = time.process_time()
        for _ in range(calls):
            await way(model, prompt)
            times.append(1e3 * (time.process_time() - start))
        return {}

    node: Any = atalk if way in (_ainvoke, _astream) else talk
    graph = StateGraph(MessagesState).add_node("talk", node).add_edge(START, "talk").add_edge("talk", END).compile()
    gc.collect()
    with record() if recorded else nullcontext():
        if node is atalk:
            LOOP.run(graph.ainvoke({"messages": []}))
        else:
            graph.invoke({"messages": []})
    return times


if __name__ == "__main__":
    typer.run(main)
