"""Random LangGraph programs whose every model call says in its prompt from which node and run it comes.

Invariant: the prompt is made by the code of the node itself, from where the program put it; so the prompt that arrives
on the other side of the wire tells what must be recorded, whatever LangGraph, LangChain and the recorder made of it.
"""

from __future__ import annotations

import operator
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, TypedDict

from hypothesis import strategies as st
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import RetryPolicy, Send


def _same(before: str, after: str) -> str:
    return after or before


class State(TypedDict):
    run: Annotated[str, _same]
    log: Annotated[list[str], operator.add]


NOTHING: dict[str, Any] = {"log": []}
STYLES = ("plain", "stream", "batch", "chain", "retry", "tools", "tasks")


@dataclass
class Ask:
    """A node that calls the model."""

    style: str


@dataclass
class Inner:
    """A graph inside a node: as the node itself, or called by it once or twice."""

    steps: list[Any]
    how: str


@dataclass
class Branches:
    """Nodes at once."""

    nodes: list[Any]


@dataclass
class Map:
    """One graph for each of several `Send`s."""

    steps: list[Any]
    count: int


def programs() -> st.SearchStrategy[list[Any]]:
    """Lists of steps that follow each other."""
    ask = st.builds(Ask, st.sampled_from(STYLES))

    def deeper(steps: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        several = st.lists(steps, min_size=1, max_size=2)
        inner = st.builds(Inner, several, st.sampled_from(("node", "called", "called twice")))
        branches = st.builds(Branches, st.lists(st.one_of(ask, inner), min_size=2, max_size=3))
        return st.one_of(inner, branches, st.builds(Map, several, st.integers(1, 3)))

    return st.lists(st.recursive(ask, deeper, max_leaves=5), min_size=1, max_size=3)


@dataclass
class App:
    """A program as an application.

    Args:
        model: The chat model that it calls.
        is_async: Whether its nodes are coroutines.
    """

    model: Any
    is_async: bool
    asked: Counter[str] = field(default_factory=Counter)
    """Every prompt that a node has sent, as the node counts it."""
    failures: Counter[str] = field(default_factory=Counter)
    """How often a node failed after it had its answer, by run."""
    _failed: set[str] = field(default_factory=set)
    _lock: Any = field(default_factory=threading.Lock)

    def build(self, steps: list[Any], path: str = "") -> Any:
        """The compiled graph of a list of steps."""
        builder = StateGraph(State)
        ends = [START]
        for number, step in enumerate(steps):
            if isinstance(step, Map):
                spread, name = f"spread{number}", f"map{number}"
                builder.add_node(spread, lambda state: NOTHING)
                builder.add_node(name, self.build(step.steps, f"{path}{name}|"))
                builder.add_conditional_edges(spread, _sends(name, step.count), [name])
                starts, ends_here = [spread], [name]
            else:
                nodes = step.nodes if isinstance(step, Branches) else [step]
                starts = ends_here = [f"n{number}{'abc'[place]}" for place in range(len(nodes))]
                for name, node in zip(starts, nodes, strict=True):
                    self._add(builder, name, node, path)
            for name in starts:
                builder.add_edge(ends if len(ends) > 1 else ends[0], name)
            ends = ends_here
        builder.add_edge(ends if len(ends) > 1 else ends[0], END)
        return builder.compile()

    def _add(self, builder: Any, name: str, node: Any, path: str) -> None:
        policy = None
        if isinstance(node, Inner):
            inner = self.build(node.steps, f"{path}{name}|")
            runnable = inner if node.how == "node" else self._calling(inner, 2 if node.how == "called twice" else 1)
        elif node.style == "chain":
            runnable = RunnableLambda(lambda state: self._prompt(path + name, state)) | self.model | _nothing
        elif node.style == "tools":
            runnable = self._calling(self._tools(f"{path}{name}|"), 1, messages=True)
        elif node.style == "tasks":
            runnable = self._calling(self._tasks(f"{path}{name}|"), 1)
        else:
            runnable = self._asking(path + name, node.style)
            policy = RetryPolicy(initial_interval=0.001, jitter=False)
        builder.add_node(name, runnable, retry_policy=policy)

    def _prompt(self, node: str, state: Any) -> str:
        prompt = f"{node} of {state['run']}"
        with self._lock:
            self.asked[prompt] += 1
        return prompt

    def _asking(self, node: str, style: str) -> Any:
        def before(state: State) -> list[str]:
            return [self._prompt(node, state) for _ in range(2 if style == "batch" else 1)]

        def after(state: State) -> dict[str, Any]:
            if style == "retry":
                key = f"{node} of {state['run']}"
                with self._lock:
                    first = key not in self._failed
                    self._failed.add(key)
                    self.failures[state["run"]] += first
                if first:
                    raise ConnectionError("a tool is away")
            return NOTHING

        def ask(state: State) -> dict[str, Any]:
            prompts, llm = before(state), self.model
            if style == "stream":
                list(llm.stream(prompts[0]))
            elif style == "batch":
                llm.batch(prompts)
            else:
                llm.invoke(prompts[0])
            return after(state)

        async def ask_async(state: State) -> dict[str, Any]:
            prompts, llm = before(state), self.model
            if style == "stream":
                [chunk async for chunk in llm.astream(prompts[0])]
            elif style == "batch":
                await llm.abatch(prompts)
            else:
                await llm.ainvoke(prompts[0])
            return after(state)

        return ask_async if self.is_async else ask

    def _calling(self, graph: Any, times: int, *, messages: bool = False) -> Any:
        def given(state: State) -> Any:
            calls = [{"name": "look", "args": {"run": state["run"]}, "id": f"c{number}"} for number in range(2)]
            return {"messages": [AIMessage("", tool_calls=calls)]} if messages else {**state, "log": []}

        def call(state: State) -> dict[str, Any]:
            for _ in range(times):
                graph.invoke(given(state))
            return NOTHING

        async def call_async(state: State) -> dict[str, Any]:
            for _ in range(times):
                await graph.ainvoke(given(state))
            return NOTHING

        return call_async if self.is_async else call

    def _tools(self, path: str) -> Any:
        """A graph whose tools call the model, two at once."""

        def look(run: str) -> str:
            """Look something up."""
            return str(self.model.invoke(self._prompt(f"{path}tools", {"run": run})).content)

        builder = StateGraph(MessagesState)
        builder.add_node("tools", ToolNode([look]))
        builder.add_edge(START, "tools")
        return builder.compile()

    def _tasks(self, path: str) -> Any:
        """A flow of the functional API with a call of its own and two tasks at once."""

        @task
        def draft(run: str) -> None:
            self.model.invoke(self._prompt(f"{path}flow|draft", {"run": run}))

        @task(name="draft")
        async def draft_async(run: str) -> None:
            await self.model.ainvoke(self._prompt(f"{path}flow|draft", {"run": run}))

        def flow(state: State) -> None:
            self.model.invoke(self._prompt(f"{path}flow", state))
            for future in [draft(state["run"]), draft(state["run"])]:
                future.result()

        async def flow_async(state: State) -> None:
            await self.model.ainvoke(self._prompt(f"{path}flow", state))
            for future in [draft_async(state["run"]), draft_async(state["run"])]:
                await future

        flow_async.__name__ = "flow"
        return entrypoint()(flow_async if self.is_async else flow)


_nothing = RunnableLambda(lambda _: NOTHING)


def _sends(name: str, count: int) -> Callable[[State], list[Send]]:
    return lambda state: [Send(name, {"run": state["run"], "log": []}) for _ in range(count)]
