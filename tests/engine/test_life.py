"""Starting, crashing and stopping: what was acknowledged stays, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from langgraph_art import Client, EmbeddedServer, rollout
from langgraph_art.errors import ServerStartFailed

from .graphs import one_node

pytestmark = pytest.mark.engine
KEY = "key-for-this-test"
SERVE = [sys.executable, "-m", "langgraph_art", "serve"]


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.2)


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def serve(model: Path, data_dir: Path, log: Path) -> subprocess.Popen[bytes]:
    options = [f"--model={model}", f"--data-dir={data_dir}", "--port=0", "--max-model-len=256", "--policy=desk"]
    with log.open("wb") as output:
        return subprocess.Popen(
            [*SERVE, *options, "--", "--max-num-batched-tokens", "512"],
            stderr=output,
            env={**os.environ, "LANGGRAPH_ART_SERVER_API_KEY": KEY},
        )


def url_of(log: Path) -> str:
    until(lambda: "listening on " in log.read_text(), 60, "the server's first line")
    return log.read_text().split("listening on ")[1].split()[0]


def test_kill_9_loses_nothing_and_leaves_nothing(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANGGRAPH_ART_API_KEY", KEY)
    server = serve(tiny_model, tmp_path / "data", tmp_path / "first.log")
    url = url_of(tmp_path / "first.log")
    until(lambda: ready(url), 300, "the start")
    first_lines = (tmp_path / "first.log").read_text()
    assert '"tool_parser": null' in first_lines
    assert "'max_num_batched_tokens': 512" in (tmp_path / "data" / "logs" / "engine.log").read_text()
    with Client(url) as client:
        groups = rollout(one_node(url, "desk", max_tokens=4), [{"text": "x"}], n=4, reward=len_reward, progress=False)
        run_id = groups[0].runs[0].run_id
        calls = client.calls(run_id)
        assert len(calls) == 1
        for rank, run in enumerate(groups[0].runs):
            run.reward = float(rank)
        job = client.submit(groups)
    processes = descendants(server.pid)
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    gone, alive = psutil.wait_procs(processes, timeout=30)
    assert alive == [], f"of {len(gone) + len(alive)} processes these are left"

    server = serve(tiny_model, tmp_path / "data", tmp_path / "second.log")
    url = url_of(tmp_path / "second.log")
    until(lambda: ready(url), 300, "the second start")
    with Client(url) as client:
        assert client.calls(run_id) == calls
        assert client.wait(job.id).state == "finished"
        assert client.policies.get("desk").version == 1
        assert len(list((tmp_path / "data" / "checkpoints" / "desk").iterdir())) == 1

    # The engine dies under it: later calls wait for the next one, with the trained version.
    engine = next(process for process in descendants(server.pid) if "EngineCore" in process.name())
    engine.kill()
    until(lambda: not ready(url), 60, "the notice of the engine's death")
    until(lambda: ready(url), 300, "the engine's restart")
    answer = httpx.post(
        f"{url}/v1/chat/completions",
        json={"model": "desk", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
        headers={"authorization": f"Bearer {KEY}"},
        timeout=60,
    )
    assert answer.headers["x-langgraph-art-version"] == "desk@1"

    # A second server may not share the port or the data.
    for arguments, reason in (
        ({"data_dir": tmp_path / "other", "port": int(url.rsplit(":", 1)[1])}, "cannot listen"),
        ({"data_dir": tmp_path / "data", "port": 0}, "another server uses"),
    ):
        other = subprocess.run(
            [*SERVE, f"--model={tiny_model}", *(f"--{n.replace('_', '-')}={v}" for n, v in arguments.items())],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert other.returncode == 1
        assert reason in other.stderr
        assert "Traceback" not in other.stderr

    # Ctrl-C ends everything in order.
    processes = descendants(server.pid)
    server.send_signal(signal.SIGINT)
    server.wait(timeout=60)
    assert psutil.wait_procs(processes, timeout=5)[1] == []
    port = int(url.rsplit(":", 1)[1])
    assert KEY not in "".join(log.read_text(errors="replace") for log in tmp_path.rglob("*.log"))
    assert port not in {c.laddr.port for c in psutil.net_connections() if c.status == psutil.CONN_LISTEN}


def len_reward(run: object) -> float:
    return 0.0


def test_an_engine_that_cannot_start_says_why(tiny_model: Path, tmp_path: Path) -> None:
    server = EmbeddedServer(
        str(tiny_model), port=0, data_dir=tmp_path, engine_args=["--no-such-flag"], progress=False, start_timeout=120
    )
    with pytest.raises(ServerStartFailed, match="no-such-flag"):
        server.start()


def test_a_model_that_does_not_exist_is_named(tmp_path: Path) -> None:
    server = EmbeddedServer("/no/such/model", port=0, data_dir=tmp_path, progress=False, start_timeout=120)
    with pytest.raises(ServerStartFailed, match="/no/such/model"):
        server.start()
