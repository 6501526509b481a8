"""Agents that name their models by strings, alone, under a supervisor, and as a swarm."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRetryMiddleware
from langchain.agents.structured_output import ToolStrategy
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph_supervisor import create_supervisor
from langgraph_swarm import create_handoff_tool, create_swarm
from pydantic import BaseModel


class Verdict(BaseModel):
    """The verdict."""

    good: bool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def agent() -> Any:
    return create_agent(
        "openai:gpt-4o", [add], system_prompt="Do sums.", middleware=[ModelRetryMiddleware(max_retries=1)]
    )


def judge() -> Any:
    return create_agent("anthropic:claude-sonnet-4-5", response_format=ToolStrategy(Verdict))


def supervisor() -> Any:
    adder = create_agent("openai:gpt-4o-mini", [add], name="adder")
    return create_supervisor([adder], model=ChatOpenAI(model="gpt-4o"), prompt="Delegate.").compile()


def swarm() -> Any:
    alice = create_agent("openai:gpt-4o", [add, create_handoff_tool(agent_name="bob")], name="alice")
    bob = create_agent("anthropic:claude-sonnet-4-5", [create_handoff_tool(agent_name="alice")], name="bob")
    return create_swarm([alice, bob], default_active_agent="alice").compile()
