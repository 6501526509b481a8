"""The code of docs/rewards.md runs, and every name of the package that its tables give exists."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from langgraph_art import rewards
from langgraph_art.rewards import GroupReward

from ..rewards.conftest import call, run

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()


def test_the_blocks_run_in_order() -> None:
    names: dict[str, Any] = {"__name__": "rewards_page"}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        exec(compile(block, "rewards.md", "exec"), names)
    right = asyncio.run(names["reward"](run("Paris", call("writer", written=300))))
    assert right.reward == {"right": 1.0, "close": 0.3, "length": -0.5}
    assert asyncio.run(names["reward"](run("two\nlines"))).reward == {"one line": 0.0}
    assert isinstance(names["judged"], GroupReward)


def test_every_name_exists() -> None:
    tables = re.findall(r"^\| (`.*?`) \|", PAGE, re.MULTILINE)
    assert tables
    assert all(hasattr(rewards, name) for row in tables for name in re.findall(r"`(\w+)`", row))
