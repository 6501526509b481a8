"""A ReAct agent in the style of LangChain's templates: the model is made by name, inside the node, at every call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

from langchain.chat_models import init_chat_model
from langchain_core.messages import AIMessage, AnyMessage, SystemMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode
from langgraph.runtime import Runtime


@dataclass(kw_only=True)
class Context:
    system_prompt: str = "You are a helpful assistant."
    model: str = "openai:gpt-4o-mini"


class State(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


@tool
def search(query: str) -> str:
    """Search the web."""
    return f"found {query}"


TOOLS = [search]


async def call_model(state: State, runtime: Runtime[Context]) -> dict[str, Any]:
    context = runtime.context or Context()
    model = init_chat_model(context.model, temperature=0.2).bind_tools(TOOLS)
    answer = await model.ainvoke([SystemMessage(context.system_prompt), *state["messages"]])
    return {"messages": [answer]}


def route(state: State) -> Literal["__end__", "tools"]:
    last = state["messages"][-1]
    return "tools" if isinstance(last, AIMessage) and last.tool_calls else END


builder = StateGraph(State, context_schema=Context)
builder.add_node(call_model)
builder.add_node("tools", ToolNode(TOOLS))
builder.add_edge(START, "call_model")
builder.add_conditional_edges("call_model", route)
builder.add_edge("tools", "call_model")
graph = builder.compile(name="ReAct Agent")
