"""LangGraph's own development server, with an app that is not edited, asked through a `RemoteGraph`."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from langchain_core.messages import HumanMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.pregel.remote import RemoteGraph

from langgraph_art import join_remote, load_runs, record
from langgraph_art.runs import GraphRun

from ..client.openai_stub import OpenAIStub

pytestmark = pytest.mark.slow


@pytest.fixture
def dev_server(stub: OpenAIStub, tmp_path: Path) -> Iterator[str]:
    """``langgraph dev`` under ``langgraph-art record``, without a key of OpenAI's; gives its URL."""
    shutil.copy(Path(__file__).parent / "react_template.py", tmp_path / "app.py")
    (tmp_path / "langgraph.json").write_text(json.dumps({"dependencies": ["."], "graphs": {"agent": "./app.py:graph"}}))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ours = ["-m", "langgraph_art", "record", "--to", "runs.jsonl", "--swap", "call_model=searcher"]
    theirs = ["-m", "langgraph_cli", "dev", "--no-reload", "--no-browser", "--port", str(port)]
    without = {"OPENAI_API_KEY", "OPENAI_API_BASE", "ANTHROPIC_API_KEY"}
    environment = {key: value for key, value in os.environ.items() if key not in without}
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *ours, *theirs], cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            deadline = time.monotonic() + 90
            while not _answers(url):
                assert process.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            process.wait(timeout=30)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ok", timeout=1):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _recorded(path: Path, count: int) -> list[GraphRun]:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if path.exists() and len(runs := load_runs(path)) >= count:
            return runs
        time.sleep(0.05)
    raise AssertionError(f"{path} has not {count} runs")


def test_the_two_parts_of_a_run(dev_server: str, stub: OpenAIStub, tmp_path: Path) -> None:
    builder = StateGraph(MessagesState)
    builder.add_node("research", RemoteGraph("agent", url=dev_server))
    builder.add_edge(START, "research")
    graph = builder.compile()
    question = {"messages": [HumanMessage('!tool search {"query": "Nile"}')]}
    runs = []
    for _ in range(2):
        with record(group_id="g", sampling={"temperature": 1.0, "top_p": None}) as run:
            graph.invoke(question, {"configurable": {"thread_id": str(uuid.uuid4())}})
        runs.append(run)
    remote = _recorded(tmp_path / "runs.jsonl", 2)
    assert join_remote(runs, remote) == 4
    assert join_remote(runs, remote) == 0
    for run in runs:
        assert [(call.node, call.model, call.art, call.delivered) for call in run.calls] == [
            ("research|call_model", "searcher", True, True)
        ] * 2
        sent = stub.of_run(run.run_id)
        assert [request.call for request in sent] == [call.call_id for call in run.calls]
        assert {(request.group, request.body["temperature"]) for request in sent} == {("g", 1.0)}
    assert {part.run_id for part in remote} == {run.run_id for run in runs}
    assert all(part.thread_id and part.output["messages"] for part in remote)
