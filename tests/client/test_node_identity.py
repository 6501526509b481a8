"""The node of a call, in every way in which LangGraph runs code. Subgraphs, Send and others: test_recording."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelFallbackMiddleware, ModelRequest, ToolRetryMiddleware
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables import RunnableLambda
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, create_react_agent, tools_condition
from langgraph.types import RetryPolicy, Send

from langgraph_art.chat_model import ChatART
from langgraph_art.recording import record
from langgraph_art.runs import GraphRun

from .graphs import agrees, ask_model, ask_model_async, graph_of, said
from .openai_stub import OpenAIStub


def lookup(topic: str) -> str:
    """Look a topic up."""
    return str(ChatART(model="helper").invoke(f"tell of {topic}").content)


async def alookup(topic: str) -> str:
    """Look a topic up."""
    return str((await ChatART(model="helper").ainvoke(f"tell of {topic}")).content)


def nodes_and_models(run: GraphRun) -> list[tuple[str, str]]:
    return [(call.node, call.model) for call in run.calls]


@pytest.mark.parametrize("mode", ["sync", "async", "stream"])
@pytest.mark.filterwarnings("ignore:create_react_agent has been moved")
async def test_the_older_prebuilt_agent(stub: OpenAIStub, mode: str) -> None:
    agent = create_react_agent(ChatART(model="desk"), [lookup if mode == "sync" else alookup], name="planner")
    graph = graph_of(planner=agent, write=ask_model)
    question = said(f'!tool {"lookup" if mode == "sync" else "alookup"} {{"topic": "rivers"}}')
    with record() as run:
        if mode == "sync":
            await asyncio.to_thread(graph.invoke, question)
        elif mode == "async":
            await graph.ainvoke(question)
        else:
            [part async for part in graph.astream(question, stream_mode="messages", subgraphs=True)]
    assert nodes_and_models(run) == [
        ("planner|agent", "desk"),
        ("planner|tools", "helper"),
        ("planner|agent", "desk"),
        ("write", "desk"),
    ]
    agrees(run, stub)


class Summarise(AgentMiddleware):
    """Asks a model of its own before, around and after the agent's."""

    def before_model(self, state: Any, runtime: Any) -> None:
        ChatART(model="before").invoke("sum up")

    def wrap_model_call(self, request: ModelRequest, handler: Callable[[ModelRequest], Any]) -> Any:
        ChatART(model="around").invoke("check")
        return handler(request)

    def after_model(self, state: Any, runtime: Any) -> None:
        ChatART(model="after").invoke("judge")


def test_an_agent_with_middleware(stub: OpenAIStub) -> None:
    middleware = [Summarise(), ModelFallbackMiddleware(ChatART(model="second")), ToolRetryMiddleware()]
    agent = create_agent(ChatART(model="desk", max_retries=0), [lookup], middleware=middleware, name="planner")
    with record() as run:
        graph_of(planner=agent).invoke(said("hello"))
    assert nodes_and_models(run) == [
        ("planner|Summarise.before_model", "before"),
        ("planner|model", "around"),
        ("planner|model", "desk"),
        ("planner|Summarise.after_model", "after"),
    ]
    agrees(run, stub)
    with pytest.raises(Exception, match="engine died"), record() as failed:
        agent.invoke(said("!500"))
    assert [(call.model, call.delivered) for call in failed.calls] == [
        ("before", True),
        ("around", True),
        ("desk", False),
        ("second", False),
    ]
    assert failed.error is not None
    assert failed.error.node == "model"
    agrees(failed, stub)


def test_several_tool_calls_of_one_message_are_parallel_branches(stub: OpenAIStub) -> None:
    def ask(state: MessagesState) -> dict[str, Any]:
        llm = ChatART(model="desk").bind_tools([lookup])
        answer = llm.invoke(state["messages"])
        if answer.tool_calls:
            call = answer.tool_calls[0]
            answer.tool_calls = [{**call, "id": f"c{n}", "args": {"topic": f"t{n}"}} for n in range(3)]
        return {"messages": [answer]}

    builder = StateGraph(MessagesState)
    builder.add_node("ask", ask)
    builder.add_node("tools", ToolNode([lookup]))
    builder.add_edge(START, "ask")
    builder.add_conditional_edges("ask", tools_condition)
    builder.add_edge("tools", "ask")
    with record() as run:
        builder.compile().invoke(said('!tool lookup {"topic": "rivers"}'))
    assert sorted(nodes_and_models(run)) == [("ask", "desk"), ("ask", "desk")] + [("tools", "helper")] * 3
    assert sorted(call.messages[0]["content"] for call in run.calls_at("tools")) == [f"tell of t{n}" for n in range(3)]
    agrees(run, stub)


def test_the_functional_api_with_tasks_at_once_and_a_graph_inside(stub: OpenAIStub) -> None:
    graph = graph_of(plan=ask_model)
    failures = iter([True, False])

    @task(retry_policy=RetryPolicy(initial_interval=0.001, jitter=False))
    def draft(number: int) -> str:
        answer = ChatART(model="desk").invoke(f"draft {number}")
        if number == 1 and next(failures):
            raise ConnectionError("once more")
        return str(answer.content)

    @entrypoint()
    def flow(count: int) -> list[str]:
        ChatART(model="lead").invoke("begin")
        drafts = [draft(number) for number in range(count)]
        graph.invoke(said("inside"))
        return [future.result() for future in drafts]

    with record() as run:
        flow.invoke(2)
    assert sorted((call.node, str(call.messages[0]["content"]), call.attempt) for call in run.calls) == [
        ("flow", "begin", 1),
        ("flow|draft", "draft 0", 1),
        ("flow|draft", "draft 1", 1),
        ("flow|draft", "draft 1", 2),
        ("flow|plan", "inside", 1),
    ]
    assert len({call.namespace for call in run.calls_at("draft")}) == 2, "each task is a branch"
    agrees(run, stub)


async def test_a_node_that_is_tried_again_says_so(stub: OpenAIStub) -> None:
    failures = iter([True, True, False])

    async def shaky(state: MessagesState) -> dict[str, Any]:
        # A chain inside is no new attempt: not one of the node's own name, nor one that callbacks of its own cut off.
        await RunnableLambda(lambda x: x).with_config(run_name="shaky").ainvoke("a")
        chain = RunnableLambda(lambda x: x) | ChatART(model="desk")
        answer = await chain.ainvoke("a", {"callbacks": [BaseCallbackHandler()]})
        again = await ask_model_async(state)
        if next(failures):
            raise ConnectionError("the tool was away")
        return {"messages": [answer, *again["messages"]]}

    builder = StateGraph(MessagesState)
    builder.add_node("shaky", shaky, retry_policy=RetryPolicy(initial_interval=0.001, jitter=False))
    builder.add_edge(START, "shaky")
    graph = builder.compile()
    with record() as run:
        await graph.ainvoke(said("hello"))
    assert [(call.node, call.attempt) for call in run.calls] == [("shaky", number) for number in (1, 1, 2, 2, 3, 3)]
    agrees(run, stub)


def test_a_node_that_comes_again_in_a_loop_is_no_retry(stub: OpenAIStub) -> None:
    builder = StateGraph(MessagesState)
    builder.add_node("plan", ask_model)
    builder.add_edge(START, "plan")
    builder.add_conditional_edges("plan", lambda state: "plan" if len(state["messages"]) < 4 else END)
    with record() as run:
        builder.compile().invoke(said("hello"))
    assert [(call.node, call.attempt) for call in run.calls] == [("plan", 1)] * 3
    assert len({call.namespace for call in run.calls}) == 3


async def test_several_graphs_and_recordings_at_once_in_one_loop(stub: OpenAIStub) -> None:
    """Two graphs with nodes of the same names, some in one recording, some each in its own."""
    inner = graph_of(model=ask_model_async)
    first, second = graph_of(a=inner, model=ask_model_async), graph_of(b=inner, model=ask_model)

    async def alone(graph: Any, text: str) -> GraphRun:
        with record(run_id=text) as run:
            await graph.ainvoke(said(text))
        return run

    async def together(text: str) -> GraphRun:
        with record(run_id=text) as run:
            await asyncio.gather(first.ainvoke(said(text)), second.ainvoke(said(text)))
        return run

    runs = await asyncio.gather(
        *(alone(graph, f"alone-{n}-{m}") for n, graph in enumerate((first, second)) for m in range(4)),
        *(together(f"together-{n}") for n in range(4)),
    )
    for run in runs:
        assert all(call.messages[0]["content"] == run.run_id for call in run.calls)
        own = [["a|model", "model"], ["b|model", "model"]]
        expected = sorted(own[0] + own[1]) if run.run_id.startswith("together") else own[int(run.run_id.split("-")[1])]
        assert sorted(call.node for call in run.calls) == expected
        agrees(run, stub)


def test_branches_of_send_into_subgraphs_are_told_apart(stub: OpenAIStub) -> None:
    builder = StateGraph(MessagesState)
    builder.add_node("study", graph_of(model=ask_model, check=ask_model))
    builder.add_conditional_edges(START, lambda _: [Send("study", said(f"t{n}")) for n in range(3)], ["study"])
    with record() as run:
        builder.compile().invoke(said("hello"))
    branches: dict[str, list[tuple[str, str]]] = {}
    for call in run.calls:
        branches.setdefault(call.namespace.split("|")[0], []).append((call.node, call.messages[0]["content"]))
    assert sorted(branches.values()) == [[("study|model", f"t{n}"), ("study|check", f"t{n}")] for n in range(3)]
    agrees(run, stub)
