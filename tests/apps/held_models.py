"""Models held in every way that apps hold them: global, closure, method, chain as a node, binding made at import."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypedDict

from langchain_anthropic import ChatAnthropic
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

llm = ChatOpenAI(model="gpt-4o", temperature=0.3, tags=["global"])
bound = ChatOpenAI(model="gpt-4o-mini").bind(stop=["END"], max_tokens=9)


class State(TypedDict, total=False):
    text: str
    said: dict[str, str]


def in_global(state: State) -> State:
    return {"said": {**state.get("said", {}), "global": llm.invoke(state["text"]).text}}


def in_closure() -> Callable[[State], State]:
    model = ChatAnthropic(model="claude-sonnet-4-5", max_tokens=50, stop_sequences=["\n\n"], top_k=5)

    def node(state: State) -> State:
        streamed = "".join(chunk.text for chunk in model.stream(state["text"]))
        return {"said": {**state["said"], "closure": streamed.strip()}}

    return node


class Writer:
    def __init__(self) -> None:
        self.model = ChatOpenAI(model="gpt-4o", n=1, seed=3)

    async def write(self, state: State) -> State:
        first, second = await self.model.abatch([state["text"], "second"])
        return {"said": {**state["said"], "method": f"{first.text}, {second.text}"}}


def in_binding(state: State) -> State:
    return {"said": {**state["said"], "binding": bound.invoke(state["text"]).text}}


def into_state(text: str) -> dict[str, Any]:
    return {"text": text}


chain = ChatPromptTemplate.from_messages([("system", "Be brief."), ("human", "{text}")]) | llm | StrOutputParser()

builder = StateGraph(State)
builder.add_node("in_global", in_global)
builder.add_node("in_closure", in_closure())
builder.add_node("in_method", Writer().write)
builder.add_node("in_binding", in_binding)
builder.add_node("in_chain", chain | into_state)
order = [START, "in_global", "in_closure", "in_method", "in_binding", "in_chain", END]
for before, after in pairwise(order):
    builder.add_edge(before, after)
graph = builder.compile()
