"""An app of LangGraph's functional API: tasks, a tool that asks a model itself, middleware that picks another model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain.chat_models import init_chat_model
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.func import entrypoint, task

small, large = ChatOpenAI(model="gpt-4o-mini"), ChatOpenAI(model="gpt-4o")


@tool
def summarize(text: str) -> str:
    """Summarize a text."""
    return init_chat_model("gpt-4.1-nano", max_tokens=20).invoke(text).text


@wrap_model_call
def by_length(request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
    return handler(request.override(model=small if len(request.messages) > 1 else large))


agent = create_agent(large, [summarize], middleware=[by_length])


@task
def translate(text: str) -> str:
    return large.invoke(text).text


@entrypoint()
def workflow(texts: list[str]) -> dict[str, Any]:
    translated = [future.result() for future in [translate(text) for text in texts]]
    state = agent.invoke({"messages": [("human", '!tool summarize {"text": "long"}')]})
    return {"translated": translated, "answer": state["messages"][-1].text}
