"""Small graphs for engine tests."""

from __future__ import annotations

from typing import Any, TypedDict

from langchain_core.messages import HumanMessage
from langgraph.graph import END, START, StateGraph

from langgraph_art import ChatART


class Question(TypedDict, total=False):
    text: str
    answer: str


def one_node(url: str, policy: str, *, max_tokens: int = 1) -> Any:
    """A compiled graph whose node ``say`` asks the policy."""
    llm = ChatART(model=policy, base_url=f"{url}/v1", max_tokens=max_tokens)

    def say(state: Question) -> Question:
        return {"answer": str(llm.invoke([HumanMessage(state["text"])]).content)}

    builder = StateGraph(Question)
    builder.add_node("say", say)
    builder.add_edge(START, "say")
    builder.add_edge("say", END)
    return builder.compile()


def two_nodes(url: str, planner: str, writer: str) -> Any:
    """A compiled graph whose nodes ``plan`` and ``write`` ask a policy each."""
    builder = StateGraph(Question)
    for node, policy in (("plan", planner), ("write", writer)):
        llm = ChatART(model=policy, base_url=f"{url}/v1", max_tokens=4)

        def ask(state: Question, llm: ChatART = llm) -> Question:
            return {"answer": str(llm.invoke([HumanMessage(state["text"])]).content)}

        builder.add_node(node, ask)
    builder.add_edge(START, "plan")
    builder.add_edge("plan", "write")
    builder.add_edge("write", END)
    return builder.compile()
