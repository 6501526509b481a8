"""One configurable model for the whole app; each node chooses by its config which one it is at the call."""

from __future__ import annotations

from typing import TypedDict

from langchain.chat_models import init_chat_model
from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, StateGraph

model = init_chat_model(configurable_fields=("model", "model_provider", "temperature", "max_tokens"))


class State(TypedDict, total=False):
    topic: str
    plan: str
    report: str


async def plan(state: State, config: RunnableConfig) -> State:
    planner = model.with_config({"configurable": {"model": "claude-sonnet-4-5", "model_provider": "anthropic"}})
    return {"plan": (await planner.ainvoke(state["topic"])).text}


async def write(state: State, config: RunnableConfig) -> State:
    chosen = config["configurable"].get("writer", "openai:gpt-4.1")
    writer = model.with_retry(stop_after_attempt=2).with_config(
        {"configurable": {"model": chosen, "temperature": 0.5, "max_tokens": 77}, "tags": ["writer"]}
    )
    return {"report": (await writer.ainvoke(state["plan"])).text}


builder = StateGraph(State)
builder.add_node("plan", plan)
builder.add_node("write", write)
builder.add_edge(START, "plan")
builder.add_edge("plan", "write")
builder.add_edge("write", END)
graph = builder.compile()
