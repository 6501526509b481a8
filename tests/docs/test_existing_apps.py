"""The page about existing apps: its code runs, in order, against a server that speaks OpenAI's API."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..client.openai_stub import OpenAIStub

PAGE = (Path(__file__).parents[2] / "docs" / "existing-apps.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def stub() -> Iterator[OpenAIStub]:
    running = OpenAIStub()
    running.start()
    yield running
    running.stop()


def test_the_python_blocks_run_in_order(
    stub: OpenAIStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LANGGRAPH_ART_URL", stub.url)
    monkeypatch.setenv("OPENAI_API_BASE", f"{stub.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "the-apps-own")
    # The app's Anthropic model is met in the two blocks that leave it alone; OpenAI's stands in for it there.
    app, *code = blocks("python")
    (tmp_path / "app.py").write_text(app.replace("anthropic:claude-sonnet-4-5", "openai:gpt-4o-mini"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "app", raising=False)
    names: dict[str, Any] = {"__name__": "page"}
    assert len(code) == 8
    said = []
    for block in code:
        exec(compile(block, "existing-apps.md", "exec"), names)
        said.append(capsys.readouterr().out)
    assert said[0] == "[('draft', 'writer'), ('edit', 'editor')]\n"
    assert [run.reward for run in names["groups"][0].runs] == [1.0] * 4
    assert "no call fitted 'drft'" in said[2]
    assert "('ChatOpenAI openai:gpt-4o', 'edit', 'no key of policies={...} fits it')" in said[2]
    assert said[3] == "Counter()\n"
    assert said[5] == "1\n"
    assert names["added"] == 0  # no part of this run was remote
    assert said[7] == "[('ask', 'writer@7')]\n"
    sys.modules.pop("app")


@pytest.mark.slow
def test_the_commands_exist() -> None:
    help_text = subprocess.run(
        [sys.executable, "-m", "langgraph_art", "record", "--help"],
        check=True,
        capture_output=True,
        text=True,
        env={"PATH": "", "COLUMNS": "200", "TERM": "dumb"},
    ).stdout
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    ours = [line.split(" app.py")[0].split(" langgraph_cli")[0] for line in lines if line.startswith("langgraph-art")]
    assert len(ours) == 3
    for line in ours:
        assert line.startswith("langgraph-art record ")
        assert all(option in help_text for option in re.findall(r" (--?\w[\w-]*)", line))
