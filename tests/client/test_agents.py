"""Agents of LangChain and LangGraph over `ChatART`: built as their documentation builds them, recorded node by node."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    ModelCallLimitMiddleware,
    ModelFallbackMiddleware,
    ModelRetryMiddleware,
    SummarizationMiddleware,
    wrap_model_call,
)
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel

from langgraph_art import tokens
from langgraph_art.chat_model import ChatART
from langgraph_art.recording import record

from .openai_stub import CONTEXT, OpenAIStub

with warnings.catch_warnings(action="ignore"):  # both build on what LangGraph has deprecated
    from langgraph.prebuilt import create_react_agent
    from langgraph_supervisor import create_supervisor
    from langgraph_swarm import create_handoff_tool, create_swarm

ASK = {"messages": [("user", '!tool weather {"city": "Rome"}')]}


class Verdict(BaseModel):
    """A verdict."""

    good: bool


def weather(city: str) -> str:
    """Weather of a city."""
    return f"sunny in {city}"


def nodes(run: Any) -> list[str]:
    assert all(call.art and call.delivered for call in run.calls)
    return [call.node for call in run.calls]


@pytest.mark.parametrize("streamed", [False, True])
async def test_create_agent(stub: OpenAIStub, streamed: bool) -> None:
    agent = create_agent(ChatART(model="desk"), [weather], system_prompt="Be kind.")
    with record() as run:
        if streamed:
            [part async for part in agent.astream(ASK, stream_mode="messages")]
        else:
            result = await agent.ainvoke(ASK)
            assert result["messages"][-1].text == "re: sunny in Rome"
    assert nodes(run) == ["model", "model"]
    assert stub.log[0].body["messages"][0] == {"role": "system", "content": "Be kind."}
    assert bool(stub.log[0].body.get("stream")) is streamed


def test_an_agents_structured_output_is_a_tool(stub: OpenAIStub) -> None:
    """Not a grammar on every answer, under which the model could call no other tool."""
    agent = create_agent(ChatART(model="desk"), [weather], response_format=Verdict)
    result = agent.invoke({"messages": [("user", '!tool Verdict {"good": true}')]})
    assert result["structured_response"] == Verdict(good=True)
    body = stub.log[0].body
    assert {tool["function"]["name"] for tool in body["tools"]} == {"weather", "Verdict"}
    assert "response_format" not in body


def test_an_agent_with_the_servers_structured_output(stub: OpenAIStub) -> None:
    agent = create_agent(ChatART(model="desk"), [], response_format=ProviderStrategy(Verdict))
    result = agent.invoke({"messages": [("user", '!json {"good": true}')]})
    assert result["structured_response"] == Verdict(good=True)
    assert stub.log[0].body["response_format"]["type"] == "json_schema"


def test_middleware(stub: OpenAIStub) -> None:
    @wrap_model_call
    def other_model(request: Any, handler: Any) -> Any:
        return handler(request.override(model=ChatART(model="other", max_retries=0)))

    agent = create_agent(
        ChatART(model="desk"),
        [weather],
        middleware=[
            ModelCallLimitMiddleware(run_limit=5),
            ModelFallbackMiddleware(ChatART(model="spare")),
            ModelRetryMiddleware(max_retries=1, initial_delay=0.0),
            other_model,
        ],
    )
    with record() as run:
        result = agent.invoke(ASK)
    assert result["messages"][-1].text == "re: sunny in Rome"
    assert [(call.model, call.node) for call in run.calls] == [("other", "model")] * 2


def test_summarization_by_fraction_of_the_servers_context(stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_context_lengths", {})
    llm = ChatART(model="desk")
    summarize = SummarizationMiddleware(llm, trigger=("fraction", 0.5), keep=("messages", 2))
    agent = create_agent(llm, [], middleware=[summarize], checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    with record() as run:
        agent.invoke({"messages": [HumanMessage("short")]}, config)
        assert nodes(run) == ["model"]
        long = [HumanMessage("word " * CONTEXT), AIMessage("so long"), HumanMessage("last")]
        state = agent.invoke({"messages": long}, config)
    assert nodes(run) == ["model", "SummarizationMiddleware.before_model", "model"]
    assert len(state["messages"]) == 4  # the summary, the two kept, the answer


@pytest.mark.filterwarnings("ignore")
def test_create_react_agent(stub: OpenAIStub) -> None:
    agent = create_react_agent(ChatART(model="desk"), [weather], prompt="Be kind.", response_format=Verdict)
    with record() as run:
        # The first answer is what the second call is asked.
        result = agent.invoke({"messages": [("user", '!json !json {"good": true}')]})
    assert result["structured_response"] == Verdict(good=True)
    assert nodes(run) == ["agent", "generate_structured_response"]


@pytest.mark.filterwarnings("ignore")
async def test_supervisor(stub: OpenAIStub) -> None:
    researcher = create_agent(ChatART(model="researcher"), [weather], name="researcher")
    writer = create_agent(ChatART(model="writer"), [], name="writer")
    app = create_supervisor([researcher, writer], model=ChatART(model="boss"), prompt="Delegate.").compile()
    with record() as run:
        state = await app.ainvoke({"messages": [("user", "!tool transfer_to_researcher {}")]})
    assert nodes(run) == ["supervisor|agent", "researcher|model", "supervisor|agent"]
    assert [call.model for call in run.calls] == ["boss", "researcher", "boss"]
    assert {message.name for message in state["messages"]} >= {"supervisor", "researcher"}


@pytest.mark.filterwarnings("ignore")
def test_swarm(stub: OpenAIStub) -> None:
    alice = create_agent(ChatART(model="alice"), [create_handoff_tool(agent_name="bob")], name="alice")
    bob = create_agent(ChatART(model="bob"), [weather, create_handoff_tool(agent_name="alice")], name="bob")
    app = create_swarm([alice, bob], default_active_agent="alice").compile(checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    with record() as run:
        app.invoke({"messages": [("user", "!tool transfer_to_bob {}")]}, config)
        app.invoke(ASK, config)
    assert nodes(run) == ["alice|model", "bob|model", "bob|model", "bob|model"]
    assert [call.version for call in run.calls] == ["alice@7", "bob@7", "bob@7", "bob@7"]
