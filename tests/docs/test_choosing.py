"""The code of docs/choosing.md runs, from its first block to its last."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from langgraph_art import EmbeddedServer

PAGE = Path(__file__).parents[2] / "docs" / "choosing.md"


@pytest.mark.engine
def test_the_blocks_run_in_order(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGGRAPH_ART_URL", server.url)
    names: dict[str, Any] = {"__name__": "choosing"}
    code = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(code) >= 4
    for block in code:
        exec(compile(block, PAGE.name, "exec"), names)
    assert len(names["history"].steps) == 2
    assert all(run.node_rewards.keys() == {"plan"} for group in names["trainer"].groups for run in group.runs)
