"""Apps that know nothing of langgraph-art, each kind held to the same: swapped whole, recorded as calls of policies."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from langchain_core.messages import HumanMessage

from langgraph_art import record, swap
from langgraph_art.runs import GraphRun

from ..client.openai_stub import OpenAIStub

Load = Callable[[str], ModuleType]


def check(run: GraphRun, stub: OpenAIStub, expected: list[tuple[str, str]]) -> None:
    """Each call once, at its node, by its policy, delivered, and the same at the server."""
    assert [(call.node, call.model) for call in run.calls] == expected
    assert all(call.art and call.delivered and call.response for call in run.calls)
    # A batch may arrive in another order than it began.
    assert {(r.call, r.node) for r in stub.of_run(run.run_id)} == {(c.call_id, c.node) for c in run.calls}
    assert len(stub.log) == len(run.calls)


async def test_react_template(app: Load, stub: OpenAIStub, provider: OpenAIStub) -> None:
    graph = app("react_template").graph
    question = {"messages": [HumanMessage('!tool search {"query": "Nile"}')]}
    with swap({"call_model": "searcher"}), record() as run:
        state = await graph.ainvoke(question)
    check(run, stub, [("call_model", "searcher")] * 2)
    assert state["messages"][-1].text == "re: found Nile"
    assert [r.body["temperature"] for r in stub.log] == [0.2, 0.2]
    assert stub.log[0].body["tools"][0]["function"]["name"] == "search"
    assert stub.log[0].headers["authorization"] != "Bearer the-apps-own-key"
    assert provider.log == []
    with record() as run:
        await graph.ainvoke(question)
    assert len(provider.log) == 2
    assert not any(call.art for call in run.calls)


async def test_configurable_model(app: Load, stub: OpenAIStub, provider: OpenAIStub) -> None:
    graph = app("configurable_model").graph
    with swap({"anthropic:claude-*": "planner", "gpt-4.1": "writer"}), record() as run:
        state = await graph.ainvoke({"topic": "tea"})
    check(run, stub, [("plan", "planner"), ("write", "writer")])
    assert state["report"] == "re: re: tea"
    assert "max_completion_tokens" not in stub.log[0].body  # 64,000 are Anthropic's default, not the app's wish
    assert (stub.log[1].body["temperature"], stub.log[1].body["max_completion_tokens"]) == (0.5, 77)


async def test_models_held_in_every_way(app: Load, stub: OpenAIStub, provider: OpenAIStub) -> None:
    graph = app("held_models").graph
    with swap({"in_chain": "brief", "*": "general"}) as swapped, record() as run:
        state = await graph.ainvoke({"text": "hi"})
    nodes = ["in_global", "in_closure", "in_method", "in_method", "in_binding"]
    check(run, stub, [*((node, "general") for node in nodes), ("in_chain", "brief")])
    assert state["said"]["closure"] == state["said"]["global"] == "re: hi"
    assert state["text"] == "re: hi"
    bodies = [request.body for request in stub.log]
    assert bodies[0]["temperature"] == 0.3
    assert bodies[1]["stream"]
    assert (bodies[1]["max_completion_tokens"], bodies[1]["stop"], bodies[1]["top_k"]) == (50, ["\n\n"], 5)
    assert bodies[2]["seed"] == 3
    assert (bodies[4]["stop"], bodies[4]["max_completion_tokens"]) == (["END"], 9)
    assert swapped.problems() == []
    assert provider.log == []


async def test_agents_with_model_strings(app: Load, stub: OpenAIStub, provider: OpenAIStub) -> None:
    agents = app("agents")
    agent, judge = agents.agent(), agents.judge()
    with swap({"openai:gpt-4o": "adder", "anthropic:*": "judge"}):
        with record() as run:
            state = await agent.ainvoke({"messages": [HumanMessage('!tool add {"a": 1, "b": 2}')]})
        check(run, stub, [("model", "adder")] * 2)
        assert state["messages"][-1].text == "re: 3"
        stub.log.clear()
        with record() as run:
            state = await judge.ainvoke({"messages": [HumanMessage('!tool Verdict {"good": true}')]})
        check(run, stub, [("model", "judge")])
        assert state["structured_response"] == agents.Verdict(good=True)
        assert stub.log[0].body["tool_choice"] == "required"


async def test_supervisor(app: Load, stub: OpenAIStub, provider: OpenAIStub) -> None:
    graph = app("agents").supervisor()
    with swap({"supervisor": "boss", "adder": "adder"}), record() as run:
        state: dict[str, Any] = await graph.ainvoke({"messages": [HumanMessage("!tool transfer_to_adder {}")]})
    expected = [("supervisor|agent", "boss"), ("adder|model", "adder"), ("supervisor|agent", "boss")]
    check(run, stub, expected)
    assert state["messages"][-1].text
    assert provider.log == []


async def test_swarm(app: Load, stub: OpenAIStub, provider: OpenAIStub) -> None:
    graph = app("agents").swarm()
    with swap({"alice": "alice", "bob|model": "bob"}), record() as run:
        await graph.ainvoke({"messages": [HumanMessage("!tool transfer_to_bob {}")]})
    check(run, stub, [("alice|model", "alice"), ("bob|model", "bob")])
    assert provider.log == []


async def test_an_app_for_anthropic(app: Load, stub: OpenAIStub, provider: OpenAIStub) -> None:
    module = app("anthropic_app")
    with swap({"anthropic:*": "claudette"}) as swapped, record() as run:
        state = await module.graph.ainvoke({"messages": [HumanMessage('!tool weather {"city": "Oslo"}')]})
    check(run, stub, [(node, "claudette") for node in ("ask", "ask", "force", "grade", "check")])
    assert state["grade"] == module.Grade(score=7)
    assert state["checked"] == module.Grade(score=8)
    assert [m.text for m in state["messages"] if m.type == "tool"] == ["sunny in Oslo", "sunny in Rome"]
    bodies = [request.body for request in stub.log]
    function = bodies[0]["tools"][0]["function"]
    assert (function["name"], set(function["parameters"]["properties"])) == ("weather", {"city"})
    assert (bodies[0]["tool_choice"], bodies[0]["parallel_tool_calls"]) == ("auto", False)
    assert bodies[2]["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert bodies[3]["tool_choice"]["function"]["name"] == "Grade"
    assert bodies[4]["response_format"]["json_schema"]["schema"]["properties"].keys() == {"score"}
    assert {body["temperature"] for body in bodies} == {0.1}
    assert swapped.problems() == []


def test_the_functional_api_tools_and_middleware(app: Load, stub: OpenAIStub, provider: OpenAIStub) -> None:
    workflow = app("functional").workflow
    policies = {"translate": "translator", "gpt-4.1-nano": "summarizer", "gpt-4o": "large", "*-mini": "small"}
    with swap(policies), record() as run:
        result = workflow.invoke(["a", "b"])
    agent = [
        ("workflow|model", "large"),
        ("workflow|tools", "summarizer"),
        ("workflow|model", "small"),
    ]
    check(run, stub, [*[("workflow|translate", "translator")] * 2, *agent])
    assert result == {"translated": ["re: a", "re: b"], "answer": "re: re: long"}
    assert stub.log[3].body["max_completion_tokens"] == 20
    assert provider.log == []
