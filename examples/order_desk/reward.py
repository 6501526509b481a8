"""Scores a finished run: partial credit to learn from, and a strict measure to report."""

from __future__ import annotations

import re
from collections.abc import Callable

from examples.order_desk.data import LabelledTicket
from examples.order_desk.graph import ORDER_QUEUES, QUEUES
from langgraph_art import GraphRun

WELL_FORMED = 0.1
"""Credit for an answer of the right form with the wrong content: enough to get moving, too little to settle for."""


class Scorer:
    """Knows the right answers; the graph does not.

    Args:
        tickets: labelled tickets; a run is matched by its message.
    """

    def __init__(self, tickets: list[LabelledTicket]) -> None:
        self._by_message = {ticket["message"]: ticket for ticket in tickets}

    def ticket(self, run: GraphRun) -> LabelledTicket:
        """The labelled ticket that a run was about."""
        return self._by_message[run.input["message"]]

    def reward(self, run: GraphRun) -> dict[str, float]:
        """Training reward in 0 … 1.

        An answer counts only as a whole: ``delivery`` scores, ``delivery, refund, account, product`` does not. The
        queue is worth all of it, or half where an order number has to be found too. That number counts only in the
        right queue: otherwise ``delivery`` for every refund would be a comfortable place to stay.
        """
        ticket = self.ticket(run)
        state = run.output or {}
        queue = _credit(state.get("queue"), ticket["queue"], well_formed=lambda answer: answer in QUEUES)
        if ticket["queue"] not in ORDER_QUEUES:
            return {"queue": queue}
        if state.get("queue") != ticket["queue"]:
            return {"queue": queue / 2}
        is_number = re.compile(r"[A-F]\d{4}").fullmatch
        order = _credit(state.get("order"), ticket["order"], well_formed=lambda answer: bool(is_number(answer)))
        return {"queue": queue / 2, "order": order / 2}

    def strict(self, run: GraphRun) -> float:
        """1 if the run ended exactly right: the right queue and, if it is about an order, that order's record."""
        ticket = self.ticket(run)
        state = run.output or {}
        right_order = state.get("order") == ticket["order"] and (state.get("record") is None) == (
            ticket["order"] is None
        )
        return float(state.get("queue") == ticket["queue"] and right_order)


def _credit(answer: str | None, right: str | None, well_formed: Callable[[str], bool]) -> float:
    if answer is None:
        return 0.0
    if answer == right:
        return 1.0
    return WELL_FORMED if well_formed(answer) else 0.0
