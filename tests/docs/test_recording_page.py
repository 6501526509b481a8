"""The code of docs/recording.md runs, from its first block to its last, against a stub of the server."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from langgraph_art import GraphRun, NodeCall, set_redaction

from ..loop.stub_server import StubServer

PAGE = (Path(__file__).parents[2] / "docs" / "recording.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubServer]:
    server = StubServer()
    server.start()
    monkeypatch.setenv("LANGGRAPH_ART_URL", server.url)
    yield server
    server.stop()
    set_redaction(None)


def test_the_blocks_run_in_order(
    stub: StubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "recording"}
    code = blocks("python")
    assert len(code) >= 7
    for block in code:
        exec(compile(block, "recording.md", "exec"), names)
    assert capsys.readouterr().out.startswith("answer researcher@7 re: Where is the Nile?")
    assert names["by_node"]["calls.node"].to_list() == ["answer"]
    assert names["deleted"].calls == 3
    assert (tmp_path / "runs.jsonl").read_text() == "", "the run was removed at last"


@pytest.mark.slow
@pytest.mark.parametrize("command", [line for block in blocks("bash") for line in block.splitlines()])
def test_every_command_exists(command: str) -> None:
    program, *words = command.split()
    assert program == "langgraph-art"
    options = [word for word in words if word.startswith("--")]
    shown = subprocess.run(
        [sys.executable, "-m", "langgraph_art", *words[:2], "--help"],
        check=True,
        capture_output=True,
        text=True,
        env={"PATH": "", "COLUMNS": "200", "TERM": "dumb"},
    ).stdout
    assert all(option in shown for option in options)


@pytest.mark.parametrize(("heading", "model"), [("field", GraphRun), ("field of a call", NodeCall)])
def test_every_field_of_the_format_is_described(heading: str, model: Any) -> None:
    table = re.search(rf"^\| {heading} \| \|\n(.*?)\n\n", PAGE, re.MULTILINE | re.DOTALL)
    assert table is not None
    described = {name for row in table[1].splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    extra = {"format", "version", "messages", "tools"} if model is GraphRun else set()
    assert described == {*model.model_fields, *extra}
