"""What the README and the docs tell people to run does run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from langgraph_art import Client, EmbeddedServer

REPO = Path(__file__).parents[2]
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md")), REPO / "benchmarks" / "README.md"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (REPO / "README.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.engine
def test_the_python_blocks_run_in_order(
    server: EmbeddedServer, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.policies.create("greeter")
    monkeypatch.setenv("LANGGRAPH_ART_URL", server.url)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "readme"}
    code = blocks("python")
    assert len(code) >= 4
    for block in code:
        exec(compile(block, "README.md", "exec"), names)
    assert len(names["history"].steps) == 2
    assert names["run"].output["greeting"]
    listed = subprocess.run(
        [sys.executable, "-m", "langgraph_art", "runs", "list", "runs.jsonl"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "reward" in listed.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", [line for block in blocks("bash") for line in block.splitlines()])
def test_every_command_exists(command: str) -> None:
    program, *arguments = command.split()
    if program == "make":
        subprocess.run(["make", "-n", *arguments], cwd=REPO, check=True, capture_output=True)
    else:
        assert program == "langgraph-art"
        words = [word for word in arguments if re.fullmatch("[a-z]+", word)]
        options = [word for word in arguments if word.startswith("--") and word != "--help"]
        help_text = subprocess.run(
            [sys.executable, "-m", "langgraph_art", *words, "--help"],
            check=True,
            capture_output=True,
            text=True,
            env={"PATH": "", "COLUMNS": "200", "TERM": "dumb"},
        ).stdout
        assert all(option in help_text for option in options)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(
        r"`((?:langgraph_art|server|docs|examples|benchmarks|requirements)/[\w./-]+\.\w+)`", page.read_text()
    )
    assert [name for name in named if not (REPO / name).exists()] == []
