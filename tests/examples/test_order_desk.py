"""The demo: its data, its reward, and the command as a newcomer runs it."""

from __future__ import annotations

import difflib
import json
import os
import re
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from examples.order_desk.data import load_orders, load_tickets
from examples.order_desk.graph import CLASSIFY_EXAMPLES, ORDER_QUEUES, QUEUES, graph
from examples.order_desk.reward import WELL_FORMED, Scorer
from langgraph_art import GraphRun

REPO = Path(__file__).parents[2]
TRAIN, HELDOUT = load_tickets("train"), load_tickets("heldout")
SCORER = Scorer(TRAIN + HELDOUT)
ORDERS = load_orders()


def test_the_data_is_what_its_card_says() -> None:
    assert Counter(ticket["queue"] for ticket in TRAIN) == dict.fromkeys(QUEUES, 66)
    assert Counter(ticket["queue"] for ticket in HELDOUT) == dict.fromkeys(QUEUES, 24)
    tickets = TRAIN + HELDOUT
    assert len({ticket["message"] for ticket in tickets}) == len({ticket["id"] for ticket in tickets}) == 360
    for ticket in tickets:
        found = re.findall(r"\b[A-F]\d{4}\b", ticket["message"])
        assert found == ([ticket["order"]] if ticket["queue"] in ORDER_QUEUES else []), ticket["id"]
        assert ticket["order"] is None or ticket["order"] in ORDERS
    numbers = Counter(ticket["order"] for ticket in tickets if ticket["order"])
    assert set(numbers.values()) == {1}


def test_nothing_held_out_was_seen_in_training_or_in_the_prompt() -> None:
    seen = [ticket["message"] for ticket in TRAIN] + [message for message, _ in CLASSIFY_EXAMPLES]
    for ticket in HELDOUT:
        matcher = difflib.SequenceMatcher(b=ticket["message"], autojunk=False)
        for message in seen:
            matcher.set_seq1(message)
            assert matcher.real_quick_ratio() < 0.8 or matcher.quick_ratio() < 0.8 or matcher.ratio() < 0.8


def run(ticket: Any, **output: Any) -> GraphRun:
    return GraphRun(run_id="r", input={"message": ticket["message"]}, output=output)


DELIVERY = next(ticket for ticket in TRAIN if ticket["queue"] == "delivery")
ACCOUNT = next(ticket for ticket in TRAIN if ticket["queue"] == "account")


@pytest.mark.parametrize(
    ("ticket", "output", "reward", "strict"),
    [
        (ACCOUNT, {"queue": "account"}, 1.0, 1.0),
        (ACCOUNT, {"queue": "product"}, WELL_FORMED, 0.0),
        (ACCOUNT, {"queue": "account."}, 0.0, 0.0),
        (ACCOUNT, {"queue": "account, delivery, refund, product"}, 0.0, 0.0),
        (ACCOUNT, {"queue": "refund", "order": "none", "record": None}, WELL_FORMED, 0.0),
        (DELIVERY, {"queue": "delivery", "order": DELIVERY["order"], "record": {"item": "x"}}, 1.0, 1.0),
        (DELIVERY, {"queue": "delivery", "order": "A0000", "record": None}, 0.5 + WELL_FORMED / 2, 0.0),
        (DELIVERY, {"queue": "delivery", "order": f"It is {DELIVERY['order']}.", "record": None}, 0.5, 0.0),
        (DELIVERY, {"queue": "refund", "order": DELIVERY["order"], "record": {"item": "x"}}, WELL_FORMED / 2, 0.0),
        (DELIVERY, {"queue": "account"}, WELL_FORMED / 2, 0.0),
        (DELIVERY, {}, 0.0, 0.0),
    ],
)
def test_the_reward_cannot_be_had_by_a_trick(ticket: Any, output: dict[str, Any], reward: float, strict: float) -> None:
    assert sum(SCORER.reward(run(ticket, **output)).values()) == pytest.approx(reward)
    assert SCORER.strict(run(ticket, **output)) == strict


def test_a_run_that_failed_scores_nothing() -> None:
    failed = GraphRun(run_id="r", input={"message": ACCOUNT["message"]}, output=None)
    assert sum(SCORER.reward(failed).values()) == SCORER.strict(failed) == 0.0


def test_the_graph_has_two_llm_nodes_a_tool_and_a_branch() -> None:
    drawn = graph.get_graph()
    assert set(drawn.nodes) == {"__start__", "classify", "find_order", "lookup_order", "__end__"}
    assert {edge.target for edge in drawn.edges if edge.source == "classify"} == {"find_order", "__end__"}


@pytest.mark.engine
def test_the_demo_runs_as_a_newcomer_would_run_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "examples/order_desk/train.py", "--steps", "1", "--out", str(tmp_path / "out")],
        cwd=REPO,
        env={**os.environ, "LANGGRAPH_ART_URL": f"http://127.0.0.1:{port}", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert set(summary) == {
        "heldout_before",
        "heldout_after",
        "reward_before",
        "reward_after",
        "train_seconds",
        "steps",
        "seed",
    }
    assert summary["steps"] == 1
    assert 0 <= summary["heldout_before"] <= 1
    assert (tmp_path / "out" / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "out" / "runs" / "step-0001.jsonl").read_text().splitlines()) == 128
    assert "solved exactly" in done.stdout
    assert "desk@1" in done.stdout
    assert [process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(process.info)] == []
