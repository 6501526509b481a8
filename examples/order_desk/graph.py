"""The support desk of a small shop as a LangGraph graph: two LLM nodes, a branch and a tool.

``classify`` names the queue of a customer's message. For queues that are about an order, ``find_order`` copies the
order number out of the message and ``lookup_order`` looks it up.

    START ─▶ classify ─┬─ delivery, refund ─▶ find_order ─▶ lookup_order ─▶ END
                       └─ anything else ───────────────────────────────────▶ END
"""

from __future__ import annotations

from typing import TypedDict

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langgraph.graph import END, START, StateGraph

from examples.order_desk.data import load_orders
from langgraph_art import ChatART

QUEUES = ("delivery", "refund", "account", "product")
ORDER_QUEUES = ("delivery", "refund")

# A small model follows examples better than instructions.
CLASSIFY_EXAMPLES = [
    ("How do I change my email address?", "account"),
    ("The vase from C2222 broke, please pay me back.", "refund"),
    ("Does the lamp need a special bulb?", "product"),
    ("The courier has not come yet, tracking says Leeds.", "delivery"),
    ("I cannot log in.", "account"),
    ("I want my money back for B1111.", "refund"),
    ("Is this shirt made of cotton?", "product"),
    ("Where is my parcel E1111?", "delivery"),
    ("Please delete my profile.", "account"),
    ("The coat from F4444 is too small, I am sending it back.", "refund"),
    ("Which sizes does the jacket come in?", "product"),
    ("My order D3333 should have been here on Monday.", "delivery"),
]
CLASSIFY = [SystemMessage("Label the customer's message with one word: delivery, refund, account or product.")]
for example, queue in CLASSIFY_EXAMPLES:
    CLASSIFY += [HumanMessage(example), AIMessage(queue)]
FIND_ORDER = [
    SystemMessage("Copy the order number from the customer's message."),
    HumanMessage("Where is my parcel E1111?"),
    AIMessage("E1111"),
    HumanMessage("The vase from C2222 broke on 3 May, please pay me back."),
    AIMessage("C2222"),
]


class Ticket(TypedDict, total=False):
    """State of the graph; a run starts with ``message`` alone."""

    message: str
    queue: str
    """What ``classify`` answered, as it is."""
    order: str
    """What ``find_order`` answered, as it is."""
    record: dict[str, str] | None
    """The order's record, or ``None`` if the number is unknown."""


# The one line that makes the graph trainable: ChatOpenAI(model="gpt-4o", max_tokens=8) before.
llm = ChatART(model="desk", max_tokens=8)
orders = load_orders()


def classify(state: Ticket) -> Ticket:
    """Ask the model for the queue."""
    answer = llm.invoke([*CLASSIFY, HumanMessage(state["message"])])
    return {"queue": str(answer.content)}


def find_order(state: Ticket) -> Ticket:
    """Ask the model for the order number."""
    answer = llm.invoke([*FIND_ORDER, HumanMessage(state["message"])])
    return {"order": str(answer.content)}


def lookup_order(state: Ticket) -> Ticket:
    """The tool: a look into the order table."""
    return {"record": orders.get(state["order"])}


def needs_order(state: Ticket) -> str:
    """The branch after ``classify``."""
    return "find_order" if state["queue"] in ORDER_QUEUES else END


builder = StateGraph(Ticket)
builder.add_node("classify", classify)
builder.add_node("find_order", find_order)
builder.add_node("lookup_order", lookup_order)
builder.add_edge(START, "classify")
builder.add_conditional_edges("classify", needs_order, ["find_order", END])
builder.add_edge("find_order", "lookup_order")
builder.add_edge("lookup_order", END)
graph = builder.compile()
