"""Reads the shipped tickets and the order table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, TypedDict

DATA = Path(__file__).parent / "data"


class LabelledTicket(TypedDict):
    """One line of ``tickets.jsonl``."""

    id: str
    message: str
    queue: str
    order: str | None
    split: Literal["train", "heldout"]


def load_tickets(split: Literal["train", "heldout"]) -> list[LabelledTicket]:
    """The tickets of one split, in file order."""
    with (DATA / "tickets.jsonl").open(encoding="utf-8") as lines:
        tickets: list[LabelledTicket] = [json.loads(line) for line in lines]
    return [ticket for ticket in tickets if ticket["split"] == split]


def load_orders() -> dict[str, dict[str, str]]:
    """Order number to the order's record: ``item``, ``status``, ``placed``."""
    orders: dict[str, dict[str, str]] = json.loads((DATA / "orders.json").read_text(encoding="utf-8"))
    return orders
