"""``langgraph-art record``: a script that knows nothing of us, recorded and swapped from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from langgraph_art import instrument, load_runs
from langgraph_art.cli.main import app

from ..client.openai_stub import OpenAIStub

SCRIPT = """
import os, sys
import beside
from react_template import graph
import asyncio
assert __name__ == "__main__" and sys.argv[1:] == ["--to", "him"], sys.argv
state = asyncio.run(graph.ainvoke({"messages": [("human", "hi")]}))
print(state["messages"][-1].text)
sys.exit(7)
"""


@pytest.mark.slow
def test_a_script(stub: OpenAIStub, tmp_path: Path) -> None:
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "main.py").write_text(SCRIPT)
    (folder / "beside.py").write_text("")
    (folder / "react_template.py").write_bytes((Path(__file__).parent / "react_template.py").read_bytes())
    environment = {key: value for key, value in os.environ.items() if key not in ("OPENAI_API_KEY", "OPENAI_API_BASE")}
    command = [sys.executable, "-m", "langgraph_art", "record", "--to", "runs.jsonl", "--swap", "openai:*=searcher"]
    done = subprocess.run(
        [*command, "app/main.py", "--to", "him"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (7, "re: hi\n"), done.stderr
    (run,) = load_runs(tmp_path / "runs.jsonl")
    assert [(call.node, call.model, call.art) for call in run.calls] == [("call_model", "searcher", True)]
    assert [request.run for request in stub.log] == [run.run_id]


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["record", *arguments], env={"COLUMNS": "200"})
        assert done.exit_code == 2
        return done.output

    monkeypatch.chdir(tmp_path)
    assert "KEY=POLICY" in said("--swap", "gpt-4o", "broken.py")
    assert "no effect without" in said("--fallback", "3", "broken.py")


def test_a_script_that_fails_shows_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.setenv("LANGGRAPH_ART_RECORD", "")  # so that it is set back
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.syspath_prepend("")
    try:
        done = CliRunner().invoke(app, ["record", "--to", str(tmp_path / "runs.jsonl"), str(tmp_path / "broken.py")])
    finally:
        if instrument._handler is not None:
            instrument._handler.stop()
    assert done.exit_code == 1
    assert "broken.py" in done.stderr
    assert "ZeroDivisionError" in done.stderr
