"""The worker as its parent sees it: a real process and its pipes."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import psutil
import pytest
from transformers import AutoModelForCausalLM

from langgraph_art_server.training.task import TaskGroup, TrainTask

from .tasks import call, group, policy_task, train_task

# Real processes are started and ended again and again.
pytestmark = pytest.mark.slow

NOISY_IMPORT = """
import os, sys
class Noisy:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.write(1, b"a library that prints to stdout\\n")
            print("and one that uses print")
sys.meta_path.insert(0, Noisy())
"""


class Worker:
    def __init__(self, model_dir: Path, root: Path, token_budget: int | None = 8) -> None:
        (root / "sitecustomize.py").write_text(NOISY_IMPORT)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)]),
            "OMP_WAIT_POLICY": "passive",
        }
        self.log = root / "stderr"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "langgraph_art_server.training.worker", "--model", str(model_dir)),
                    *("--device", "cpu", "--threads", "1"),
                    *(() if token_budget is None else ("--token-budget", str(token_budget))),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
            )
        self.ready = self.receive()

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        message: dict[str, Any] = json.loads(line)
        return message

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def do(self, task: TrainTask | str) -> list[dict[str, Any]]:
        """Sends a task; returns its messages up to the last."""
        self.send(task if isinstance(task, str) else task.model_dump_json())
        messages = [self.receive()]
        while messages[-1]["kind"] == "progress":
            messages.append(self.receive())
        return messages


@pytest.fixture(scope="module")
def worker(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    worker = Worker(model_dir, tmp_path_factory.mktemp("worker"))
    yield worker
    worker.end()


def groups(answer: int = 5) -> list[TaskGroup]:
    return [group((1.0, [call([1, 2, 3], [answer, 6])]), (0.0, [call([1, 2, 4], [9, 8, 7])]))]


def test_ready_tells_device_and_size(worker: Worker, model_dir: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    assert worker.ready == {
        "kind": "ready",
        "device": "cpu",
        "parameters": base.num_parameters(),
        "token_budget": 8,
        "checkpointing": False,
    }
    assert "a library that prints to stdout" in worker.log.read_text()
    assert "and one that uses print" in worker.log.read_text()


def test_trains_and_reports_progress(worker: Worker, model_dir: Path, tmp_path: Path) -> None:
    messages = worker.do(train_task(policy_task(groups(), tmp_path), task_id="one"))
    assert [message["kind"] for message in messages] == ["progress"] * (len(messages) - 1) + ["trained"]
    assert {message["task_id"] for message in messages} == {"one"}
    assert (messages[0]["done"], messages[-2]["done"]) == (0, messages[0]["total"])
    (update,) = messages[-1]["updates"]
    assert (update["version"], update["runs"], update["calls"], update["trained_tokens"]) == (1, 2, 2, 5)
    assert update["metrics"]["grad_norm"] > 0
    adapter = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), tmp_path / "p-1")
    assert any(parameter.abs().sum() > 0 for name, parameter in adapter.named_parameters() if "lora_B" in name)


def test_bad_calls_are_counted(worker: Worker, tmp_path: Path) -> None:
    runs = groups()[0].runs
    runs[0].calls += [
        call([1, 10_000], [3]),
        call([1], [2, 3], logprobs=[-1.0]),
        call([1], [2], logprobs=[math.nan]),
    ]
    task = train_task(policy_task([TaskGroup(group_id="g", runs=runs)], tmp_path))
    trained = worker.do(task)[-1]
    assert trained["skipped"] == {"call:bad_ids": 1, "call:bad_lengths": 1, "call:bad_logprobs": 1}
    assert trained["updates"][0]["calls"] == 2


def test_failures_are_answered_and_the_next_task_works(worker: Worker, tmp_path: Path) -> None:
    broken = policy_task(groups(), tmp_path, policy="broken", parent=3)
    (_, failed) = worker.do(train_task(broken, task_id="no parent"))
    assert (failed["kind"], failed["task_id"]) == ("failed", "no parent")
    assert "FileNotFoundError" in failed["error"]
    assert "\n" not in failed["error"]
    assert "Traceback" in failed["traceback"]

    for line, task_id in (("{not json", ""), ('{"task_id": "odd", "policies": 3}', "odd"), ("[1]", "")):
        (failed,) = worker.do(line)
        assert (failed["kind"], failed["task_id"]) == ("failed", task_id)

    # A failure after the first policy was trained fails the whole task.
    messages = worker.do(train_task(policy_task(groups(), tmp_path), broken))
    assert messages[-1]["kind"] == "failed"

    assert worker.do(train_task(policy_task(groups(), tmp_path / "next")))[-1]["kind"] == "trained"


def test_fresh_process_resumes_bit_for_bit(worker: Worker, model_dir: Path, tmp_path: Path) -> None:
    """The third step by a process that never saw the first two gives the same bytes; so does the same task again."""
    for version in range(3):
        task = policy_task(groups(version), tmp_path, parent=version)
        assert worker.do(train_task(task))[-1]["kind"] == "trained"
    fresh = Worker(model_dir, tmp_path)
    again = task.model_copy(update={"out_dir": str(tmp_path / "again")})
    assert fresh.do(train_task(again))[-1]["kind"] == "trained"
    files = sorted(path.name for path in (tmp_path / "p-3").iterdir())
    assert len(files) == 4
    for name in files:
        assert (tmp_path / "p-3" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    _end_of_stdin_ends_it_at_once(fresh, tmp_path)


def _end_of_stdin_ends_it_at_once(worker: Worker, tmp_path: Path) -> None:
    """In the middle of a long task, as when the parent is killed."""
    long = [
        group(*[(reward, [call([first, second, third], [5, 6])]) for reward in (0.0, 1.0)])
        for first in range(30)
        for second in range(30)
        for third in range(10)
    ]
    worker.send(train_task(policy_task(long, tmp_path, policy="long")).model_dump_json())
    progress = [worker.receive() for _ in range(3)][-1]
    assert progress["done"] < progress["total"] - 500, "the task must still be at work"
    assert worker.process.stdin is not None
    worker.process.stdin.close()
    started = time.monotonic()
    worker.process.wait(timeout=10)
    assert time.monotonic() - started < 2
    assert not (tmp_path / "long-1").exists()
    worker.end()


def test_too_little_memory_is_answered_by_a_smaller_plan(worker: Worker, tmp_path: Path) -> None:
    """With the real allocator: first checkpointing, then half the tokens, as often as it takes."""
    many = [
        group(*[(reward, [call([first, second], [5, 6] * 20)]) for reward in (0.0, 1.0)])
        for first in range(30)
        for second in range(30)
    ]
    task = train_task(policy_task(many, tmp_path)).model_copy(update={"token_budget": 100_000, "checkpointing": False})
    used = psutil.Process(worker.process.pid).memory_info().vms
    resource.prlimit(worker.process.pid, resource.RLIMIT_AS, (used + 40 * 2**20, resource.RLIM_INFINITY))
    plans = []
    while (answer := worker.do(task)[-1])["kind"] == "back_off":
        plans.append((answer["token_budget"], answer["checkpointing"]))
        task = task.model_copy(update={"token_budget": plans[-1][0], "checkpointing": plans[-1][1]})
    assert answer["kind"] == "trained"
    assert plans == [(100_000 // 2**time, True) for time in range(len(plans))]
    assert len(plans) > 1
    assert answer["updates"][0]["metrics"]["token_budget"] == plans[-1][0]
    assert answer["updates"][0]["metrics"]["gradient_checkpointing"] == 1.0
    resource.prlimit(worker.process.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert worker.do(train_task(policy_task(groups(), tmp_path / "next")))[-1]["kind"] == "trained"


def test_plan_of_its_own(model_dir: Path, tmp_path: Path) -> None:
    """Without a budget the worker measures the model; a tiny one gets the largest packs."""
    worker = Worker(model_dir, tmp_path, token_budget=None)
    assert worker.ready["token_budget"] > 1000
    assert worker.ready["checkpointing"] is False
    worker.end()


def test_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "langgraph_art_server.training.worker", "--model", str(tmp_path / "none")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    reading, writing = os.pipe()  # stdin stays open, or its end would end the process first
    done = subprocess.run(command, stdin=reading, capture_output=True, env=environment, check=False, timeout=120)
    os.close(reading)
    os.close(writing)
    assert done.returncode == 1
    assert done.stdout == b""
    assert str(tmp_path / "none") in done.stderr.decode()
