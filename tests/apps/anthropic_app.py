"""An app written for Anthropic's API: its tools, its forced tool choice, structured output, cached system prompts."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode
from pydantic import BaseModel, Field

model = ChatAnthropic(model="claude-sonnet-4-5", temperature=0.1, max_retries=5, timeout=7)
SYSTEM = SystemMessage([{"type": "text", "text": "Find the weather.", "cache_control": {"type": "ephemeral"}}])


@tool
def weather(city: str) -> str:
    """Weather in a city."""
    return f"sunny in {city}"


class Grade(BaseModel):
    """Grade of an answer."""

    score: int = Field(description="0 to 10")


class State(TypedDict, total=False):
    messages: Annotated[list[AnyMessage], add_messages]
    grade: Grade
    checked: Grade


def ask(state: State) -> dict[str, Any]:
    return {"messages": [model.bind_tools([weather], parallel_tool_calls=False).invoke([SYSTEM, *state["messages"]])]}


def force(state: State) -> dict[str, Any]:
    forced = model.bind_tools([weather], tool_choice="weather")
    return {"messages": [forced.invoke([*state["messages"], HumanMessage('!tool weather {"city": "Rome"}')])]}


def grade(state: State) -> dict[str, Any]:
    return {"grade": model.with_structured_output(Grade).invoke('!tool Grade {"score": 7}')}


async def check(state: State) -> dict[str, Any]:
    structured = model.with_structured_output(Grade, method="json_schema")
    return {"checked": await structured.ainvoke('!json {"score": 8}')}


def route(state: State) -> str:
    return "tools" if state["messages"][-1].tool_calls else "force"


builder = StateGraph(State)
for node in (ask, force, grade, check):
    builder.add_node(node)
builder.add_node("tools", ToolNode([weather]))
builder.add_node("last_tools", ToolNode([weather]))
builder.add_edge(START, "ask")
builder.add_conditional_edges("ask", route)
builder.add_edge("tools", "ask")
builder.add_edge("force", "last_tools")
builder.add_edge("last_tools", "grade")
builder.add_edge("grade", "check")
builder.add_edge("check", END)
graph = builder.compile()
