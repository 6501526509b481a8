"""The queue from submission to serving version, with a real trainer process on a tiny model and everything that dies.

One worker serves most tests, as its start takes seconds; so they share an event loop.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio

from langgraph_art.protocol import (
    HEADER_CALL,
    HEADER_RUN,
    CallClaim,
    GroupSubmission,
    Job,
    PolicyUpdate,
    RecordedExample,
    RunSubmission,
    SftConfig,
    SftSubmission,
    Submission,
    TrainConfig,
    TrainResult,
)
from langgraph_art_server.config import ServerSettings, TeacherAddress
from langgraph_art_server.models import BaseModel
from langgraph_art_server.storage.database import Database
from langgraph_art_server.storage.jobs import NewVersion, PackingPlan
from langgraph_art_server.storage.policies import PolicyStore
from langgraph_art_server.training import runner as runner_module
from langgraph_art_server.training.runner import MAX_WORKER_DEATHS
from langgraph_art_server.training.task import SftTask, Trained, TrainTask
from langgraph_art_server.training.trainer import OutOfMemory, Trainer, WorkerDied, WorkerKilled

from ..training.conftest import tiny_llama
from .records import recorded
from .rooms import Rooms, eventually, open_rooms
from .stub_engine import Answer, StubEngine, serving
from .test_teacher import StubVllm

# Real workers are started and killed again and again.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

FILES = ["adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors", "trainer_state.json"]


class SharedTrainer(Trainer):
    """The real trainer, which outlives the runners that use it."""

    tasks = 0
    """Tasks that it was given."""

    async def train(self, task: TrainTask | SftTask, on_progress: Callable[[int, int], None]) -> Trained:
        self.tasks += 1
        return await super().train(task, on_progress)

    async def stop(self) -> None:
        """Not now; see :meth:`end`."""

    async def end(self) -> None:
        await super().stop()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_llama(attention="sdpa").save_pretrained(directory)
    return directory


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SharedTrainer]:
    log = tmp_path_factory.mktemp("trainer") / "trainer.log"
    trainer = SharedTrainer(ServerSettings(token_budget=64), BaseModel("tiny", model_dir, {}), "cpu", log)
    yield trainer
    await trainer.end()


@pytest_asyncio.fixture(loop_scope="module")
async def stub() -> AsyncIterator[StubEngine]:
    async with StubEngine().running() as stub:
        yield stub


@pytest_asyncio.fixture(loop_scope="module")
async def rooms(stub: StubEngine, tmp_path: Path, model_dir: Path, shared: SharedTrainer) -> AsyncIterator[Rooms]:
    async with opened(tmp_path, stub, model_dir, shared) as rooms:
        yield rooms


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "_RETRY", 0.05)


@asynccontextmanager
async def opened(
    data_dir: Path,
    stub: StubEngine,
    model_dir: Path,
    trainer: Trainer | None,
    teachers: Sequence[TeacherAddress] = (),
) -> AsyncIterator[Rooms]:
    """Rooms whose runner stops at the end, if it was started."""
    async with open_rooms(data_dir, stub, model_dir, trainer, teachers) as rooms:
        try:
            yield rooms
        finally:
            await rooms.runner.stop()


def prepare(
    rooms: Rooms, key: str, *, policies: tuple[str, ...] = ("desk",), calls: int = 1, config: TrainConfig | None = None
) -> Submission:
    """Two recorded runs with ``calls`` calls of each policy, one rewarded, and the submission that claims them."""
    source = random.Random(key)
    runs = []
    for reward in (0.0, 1.0):
        run_id = f"{key}-{reward:.0f}"
        records = [
            recorded(
                f"{run_id}-{policy}-{number}",
                run_id=run_id,
                policy=policy,
                model=policy,
                version=rooms.policies.head(policy).latest,
                prompt_ids=source.choices(range(3, 30), k=10),
                sampled_ids=source.choices(range(3, 30), k=5),
                logprobs=[-3.0] * 5,
            )
            for policy in policies
            for number in range(calls)
        ]
        rooms.calls.save(records)
        claims = [CallClaim(call_id=record.call_id, node="plan", delivered=True) for record in records]
        runs.append(RunSubmission(run_id=run_id, reward=reward, calls=claims))
    groups = [GroupSubmission(group_id=f"{key}-group", runs=runs)]
    return Submission(idempotency_key=key, groups=groups, config=config or TrainConfig())


async def ended(rooms: Rooms, job: Job, seconds: float = 60) -> Job:
    async with asyncio.timeout(seconds):
        return [seen async for seen in rooms.runner.follow(job.id)][-1]


def on_disk(rooms: Rooms) -> set[str]:
    """Everything below the checkpoints' directories, temporary ones included."""
    return {str(path.relative_to(rooms.data_dir)) for path in (rooms.data_dir / "checkpoints").glob("*/*")}


def content(rooms: Rooms, policy: str, version: int) -> dict[str, bytes]:
    directory = rooms.policies.directory(policy, version)
    assert directory is not None
    return {path.name: path.read_bytes() for path in (rooms.data_dir / directory).iterdir()}


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def in_the_middle(rooms: Rooms, job: Job) -> None:
    """Wait until a job is being computed, with most of it to come."""
    await eventually(lambda: rooms.runner._progress.get(job.id, (0, 0))[0] >= 1, 60)
    done, total = rooms.runner._progress[job.id]
    assert done < total / 2


# -- the good way -----------------------------------------------------------------------------------------------------


async def test_from_submission_to_serving_version(rooms: Rooms) -> None:
    """Over HTTP, watched by several followers, for two policies at once."""
    submission = prepare(rooms, "k", policies=("clerk", "desk"), calls=20)
    seen: list[list[Job]] = [[] for _ in range(3)]
    async with rooms.served() as url, httpx.AsyncClient(verify=False, base_url=url, timeout=60) as http:
        answer = await http.post("/api/submissions", json=submission.model_dump())
        assert answer.status_code == 202
        job = Job.model_validate(answer.json())
        assert job.state == "queued"
        assert (await http.post("/api/submissions", json=submission.model_dump())).json() == answer.json()

        async def follow(jobs: list[Job]) -> None:
            async with http.stream("GET", f"/api/jobs/{job.id}/events") as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        jobs.append(Job.model_validate_json(line.removeprefix("data: ")))

        following = [asyncio.create_task(follow(jobs)) for jobs in seen]
        await eventually(lambda: all(seen))
        rooms.runner.start()
        async with asyncio.timeout(60):
            await asyncio.gather(*following)
        job = Job.model_validate((await http.get(f"/api/jobs/{job.id}")).json())
        other = submission.model_copy(update={"config": TrainConfig(learning_rate=0.5)})
        assert (await http.post("/api/submissions", json=other.model_dump())).status_code == 409
    for jobs in seen:
        states = list(dict.fromkeys(job.state for job in jobs))
        assert states[:2] == ["queued", "running"]
        assert states[-1] == "finished"
        assert jobs[-1].result == job.result
        progress = [(job.done, job.total) for job in jobs if job.total]
        assert progress == sorted(progress)
        assert len({total for _, total in progress}) == 1
    assert job.result is not None
    assert job.error is None
    assert set(job.result.seconds) == {"queue", "join", "train", "load"}
    assert [(update.policy, update.parent, update.version, update.calls) for update in job.result.updates] == [
        ("clerk", 0, 1, 40),
        ("desk", 0, 1, 40),
    ]
    assert job.result.skipped == {}
    for name in ("clerk", "desk"):
        policy = rooms.policies.get(name)
        assert policy.version == 1
        assert [(version.version, version.job_id, version.serving) for version in policy.versions] == [
            (0, None, True),
            (1, job.id, True),
        ]
        assert sorted(content(rooms, name, 1)) == FILES
    assert set(rooms.stub.adapters) == {"clerk@1", "desk@1"}
    assert on_disk(rooms) == rooms.policies.directories()
    trained = rooms.jobs.already_trained(["k-0", "k-1", "other"])
    assert trained == {("k-0", "clerk"), ("k-0", "desk"), ("k-1", "clerk"), ("k-1", "desk")}


async def test_jobs_build_on_each_other_and_no_run_trains_twice(rooms: Rooms) -> None:
    rooms.runner.start()
    first = prepare(rooms, "first")
    job = await ended(rooms, await rooms.runner.submit(first))
    assert (await rooms.runner.submit(first)).id == job.id
    second = await ended(rooms, await rooms.runner.submit(prepare(rooms, "second")))
    assert second.result is not None
    assert [(update.parent, update.version) for update in second.result.updates] == [(1, 2)]
    assert second.result.updates[0].metrics["step"] == 2
    again = await ended(rooms, await rooms.runner.submit(first.model_copy(update={"idempotency_key": "again"})))
    assert again.state == "finished"
    assert again.result is not None
    assert (again.result.updates, again.result.skipped) == ([], {"call:stale_version": 2})
    assert rooms.policies.get("desk").version == 2


async def test_what_does_not_train_is_counted_and_takes_no_step(rooms: Rooms) -> None:
    rooms.runner.start()
    submission = prepare(rooms, "k", calls=2)
    for run in submission.groups[0].runs:
        run.reward = 0.5
        unclaimed = run.calls.pop()
        assert unclaimed.call_id in rooms.calls.of_ids([unclaimed.call_id])
        run.calls.append(CallClaim(call_id=f"{run.run_id}-lost", node="plan", delivered=True))
    job = await ended(rooms, await rooms.runner.submit(submission))
    assert job.state == "finished"
    assert job.result is not None
    assert job.result.skipped == {"call:unclaimed": 2, "call:not_recorded": 2, "group:no_signal": 1}
    assert [(update.parent, update.version) for update in job.result.updates] == [(0, 0)]
    assert rooms.policies.get("desk").version == 0
    assert on_disk(rooms) == set()


async def test_a_call_that_is_still_open_is_waited_for(rooms: Rooms, shared: SharedTrainer) -> None:
    rooms.runner.start()
    answer = rooms.stub.next(Answer(wait_at=2))
    submission, before = prepare(rooms, "k"), shared.tasks
    submission.groups[0].runs[0].calls[:] = [CallClaim(call_id="open", node="plan", delivered=True)]
    async with rooms.served() as url, httpx.AsyncClient(verify=False, base_url=url, timeout=60) as http:
        body = {"model": "desk", "messages": [{"role": "user", "content": "hi"}], "stream": True, "temperature": 1}
        headers = {HEADER_CALL: "open", HEADER_RUN: "k-0"}
        calling = asyncio.create_task(http.post("/v1/chat/completions", json=body, headers=headers))
        await answer.reached.wait()
        job = await rooms.runner.submit(submission)
        await eventually(lambda: rooms.jobs.get(job.id).state == "running")
        await http.get("/health")
        assert rooms.calls.of_ids(["open"]) == {}
        assert shared.tasks == before
        answer.go.set()
        assert (await calling).status_code == 200
        job = await ended(rooms, job)
    assert job.result is not None
    assert job.result.updates[0].calls == 2
    assert job.result.skipped == {"call:unclaimed": 1}


# -- what dies --------------------------------------------------------------------------------------------------------


async def test_a_worker_killed_in_the_middle_changes_nothing(
    rooms: Rooms,
    shared: SharedTrainer,
    model_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rooms.runner.start()
    job = await rooms.runner.submit(prepare(rooms, "k", calls=120))
    await in_the_middle(rooms, job)
    assert shared._process is not None
    os.kill(shared._process.pid, signal.SIGKILL)
    job = await ended(rooms, job)
    assert job.state == "finished"
    assert "lost its worker, time 1 of 3" in caplog.text
    assert "exit code -9, most likely for want of memory" in caplog.text
    assert on_disk(rooms) == rooms.policies.directories()
    async with opened(tmp_path_factory.mktemp("undisturbed"), rooms.stub, model_dir, shared) as undisturbed:
        undisturbed.stub.adapters.clear()
        undisturbed.runner.start()
        same = await ended(undisturbed, await undisturbed.runner.submit(prepare(undisturbed, "k", calls=120)))
        assert same.state == "finished"
        assert content(rooms, "desk", 1) == content(undisturbed, "desk", 1)
        assert job.result is not None
        assert same.result is not None
        assert job.result.updates == same.result.updates


async def test_a_stop_in_the_middle_leaves_the_job_to_the_next_start(
    rooms: Rooms, stub: StubEngine, model_dir: Path, shared: SharedTrainer, tmp_path: Path
) -> None:
    async with opened(tmp_path, stub, model_dir, None) as stopped:
        stopped.runner.start()
        job = await stopped.runner.submit(prepare(stopped, "k", calls=120))
        await in_the_middle(stopped, job)
        assert stopped.trainer._process is not None
        pid = stopped.trainer._process.pid
        assert alive(pid)
        await stopped.runner.stop()
        assert not alive(pid)
        assert on_disk(stopped) == set()
        assert stopped.jobs.get(job.id).state == "running"
        async with asyncio.timeout(5), stopped.compute.update():
            pass
    rooms.runner.start()  # the same data directory, as after a restart of the server
    assert (await ended(rooms, job)).state == "finished"
    assert rooms.policies.get("desk").version == 1


async def test_a_worker_that_always_dies_fails_the_job_and_no_other(
    rooms: Rooms, shared: SharedTrainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await shared.end()
    submission, next_one = prepare(rooms, "k"), prepare(rooms, "next", policies=("clerk",))
    with monkeypatch.context() as broken:
        broken.setattr(shared, "_device", "no-such-device")
        rooms.runner.start()
        job = await ended(rooms, await rooms.runner.submit(submission))
        assert job.state == "failed"
        assert job.error is not None
        assert "exit code 2" in job.error
        assert "no-such-device" in job.error
        assert job.result is None
        assert caplog.text.count("lost its worker") == MAX_WORKER_DEATHS
        assert rooms.policies.get("desk").version == 0
        assert on_disk(rooms) == set()
    assert (await ended(rooms, await rooms.runner.submit(next_one))).state == "finished"
    again = await rooms.runner.submit(submission)
    assert (again.id, again.state, again.error) == (job.id, "queued", None)
    assert (await ended(rooms, again)).state == "finished"
    assert rooms.policies.get("desk").version == 1


async def test_a_task_that_the_worker_refuses_fails_at_once(rooms: Rooms, shared: SharedTrainer) -> None:
    rooms.add_version("desk")  # a checkpoint that has no state to go on from
    rooms.runner.start()
    before = shared.tasks
    job = await ended(rooms, await rooms.runner.submit(prepare(rooms, "k", policies=("clerk", "desk"))))
    assert (job.state, shared.tasks - before) == ("failed", 1)
    assert "FileNotFoundError" in (job.error or "")
    assert (rooms.policies.head("clerk").latest, rooms.policies.head("desk").latest) == (0, 1)
    assert on_disk(rooms) == {"checkpoints/desk/1-made"}, "what was written for clerk before desk failed must go"
    assert (
        await ended(rooms, await rooms.runner.submit(prepare(rooms, "next", policies=("clerk",))))
    ).state == "finished"


async def test_a_disk_that_cannot_be_written_is_waited_out(rooms: Rooms, shared: SharedTrainer) -> None:
    checkpoints = rooms.data_dir / "checkpoints"
    checkpoints.write_text("in the way of the directory")
    rooms.runner.start()
    before = shared.tasks
    job = await rooms.runner.submit(prepare(rooms, "k"))
    await eventually(lambda: shared.tasks >= before + 3, 30)
    assert (await rooms.runner.job(job.id)).state == "running"
    checkpoints.unlink()
    job = await ended(rooms, job)
    assert (job.state, job.error) == ("finished", None)
    assert on_disk(rooms) == rooms.policies.directories()
    assert rooms.policies.get("desk").version == 1


async def test_a_commit_that_fails_leaves_no_directory_and_is_tried_again(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, failures = rooms.jobs.commit, iter([OSError("disk full"), OSError("disk full")])

    def failing(job_id: str, result: TrainResult, trained: list[NewVersion]) -> None:
        assert len(on_disk(rooms)) == 1, "of the attempts before, nothing is left"
        if (failure := next(failures, None)) is not None:
            raise failure
        commit(job_id, result, trained)

    monkeypatch.setattr(rooms.jobs, "commit", failing)
    rooms.runner.start()
    assert (await ended(rooms, await rooms.runner.submit(prepare(rooms, "k")))).state == "finished"
    assert next(failures, None) is None
    assert on_disk(rooms) == rooms.policies.directories()


# -- between commit and load ------------------------------------------------------------------------------------------


def committed(rooms: Rooms) -> Job:
    """A job whose server died between commit and load."""
    job = rooms.jobs.add(prepare(rooms, "k"))
    directory = rooms.data_dir / "checkpoints" / "desk" / "1-made"
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text("{}")
    numbers = {"runs": 2, "calls": 2, "trained_tokens": 10, "computed_tokens": 30}
    update = PolicyUpdate(policy="desk", parent=0, version=1, metrics={}, **numbers)
    result = TrainResult(updates=[update], skipped={}, seconds={"train": 1.0})
    rooms.jobs.begin(job.id)
    rooms.jobs.commit(job.id, result, [NewVersion("desk", 1, 0, "checkpoints/desk/1-made", ["k-0", "k-1"])])
    return job


async def test_a_committed_job_is_loaded_not_trained_again(rooms: Rooms, shared: SharedTrainer) -> None:
    job, before = committed(rooms), shared.tasks
    rooms.runner.start()
    job = await ended(rooms, job)
    assert job.state == "finished"
    assert job.result is not None
    assert set(job.result.seconds) == {"train", "load"}
    assert shared.tasks == before
    assert rooms.policies.get("desk").version == 1
    assert set(rooms.stub.adapters) == {"desk@1"}


async def test_a_version_of_another_base_model_does_not_hold_up_the_queue(rooms: Rooms, tmp_path: Path) -> None:
    """It was committed, then the server was started again with another model on the same data."""
    job = committed(rooms)
    database = Database(tmp_path / "server.db")
    with database.write() as connection:
        connection.exec_driver_sql("UPDATE policies SET base_model = 'large' WHERE name = 'desk'")
    rooms.runner.start()
    assert (await ended(rooms, job)).state == "finished"
    assert rooms.stub.adapters == {}
    submission = prepare(rooms, "next", policies=("clerk",))
    submission.groups[0].runs[0].calls.append(CallClaim(call_id="desks", node="plan", delivered=True))
    rooms.calls.save([recorded("desks", run_id="next-0", version=1)])
    after = await ended(rooms, await rooms.runner.submit(submission))
    assert after.result is not None
    assert [(part.policy, part.version) for part in after.result.updates] == [("clerk", 1)]
    assert after.result.skipped == {"call:other_base_model": 1}
    theirs = PolicyStore(database, base_model="large", max_rank=16, linears=frozenset())
    assert theirs.serving_version("desk") == 1, "a server of its base model serves what was trained"
    database.close()


async def test_a_refused_load_is_trained_not_serving_until_it_works(rooms: Rooms, shared: SharedTrainer) -> None:
    job, before = committed(rooms), shared.tasks
    rooms.stub.refuse_loads += [(500, "no memory for {path}")] * 3
    jobs: list[Job] = []

    async def follow() -> None:
        async for seen in rooms.runner.follow(job.id):
            jobs.append(seen)

    following = asyncio.create_task(follow())
    await eventually(lambda: jobs)
    rooms.runner.start()
    await eventually(lambda: jobs[-1].error)
    waiting = jobs[-1]
    assert waiting.state == "trained"
    assert "desk@1: " in (waiting.error or "")
    assert "no memory for its directory" in (waiting.error or "")
    async with asyncio.timeout(20):
        await following
    assert (jobs[-1].state, jobs[-1].error) == ("finished", None)
    assert len(rooms.stub.bodies("/v1/load_lora_adapter")) == 4
    assert shared.tasks == before
    assert rooms.policies.get("desk").version == 1


async def test_a_start_deletes_what_no_version_owns(rooms: Rooms) -> None:
    committed(rooms)
    clerk = rooms.data_dir / "checkpoints" / "clerk"
    for orphan in (clerk / "1-deadbeef", clerk / ".1-deadbeef.tmp", clerk.parent / "desk" / "2-deadbeef"):
        orphan.mkdir(parents=True)
        (orphan / "adapter_model.safetensors").write_text("half")
    (clerk / ".DS_Store").write_text("not ours")
    rooms.runner.start()
    assert on_disk(rooms) == {"checkpoints/desk/1-made", "checkpoints/clerk/.DS_Store"}


# -- the packing plan -------------------------------------------------------------------------------------------------


async def test_the_packing_plan_is_stored_before_it_is_used_and_replayed(
    rooms: Rooms, shared: SharedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[PackingPlan | None] = []
    train = shared.train

    async def watched(task: TrainTask | SftTask, on_progress: Callable[[int, int], None]) -> Trained:
        plans.append(rooms.jobs.plan(task.task_id))
        assert plans[-1] == PackingPlan(task.token_budget or 0, bool(task.checkpointing))
        if len(plans) == 1:
            raise OutOfMemory(PackingPlan(32, checkpointing=True))
        if len(plans) == 2:
            raise WorkerDied("told to")
        return await train(task, on_progress)

    monkeypatch.setattr(shared, "train", watched)
    rooms.runner.start()
    job = await ended(rooms, await rooms.runner.submit(prepare(rooms, "k", calls=4)))
    assert job.state == "finished"
    assert plans == [PackingPlan(64, checkpointing=False), *[PackingPlan(32, checkpointing=True)] * 2]
    assert job.result is not None
    metrics = job.result.updates[0].metrics
    assert (metrics["token_budget"], metrics["gradient_checkpointing"]) == (32, 1)
    assert on_disk(rooms) == rooms.policies.directories()


async def test_a_worker_that_is_killed_again_gets_a_smaller_plan(
    rooms: Rooms, shared: SharedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the kernel, which ends a process that takes too much memory; here, while activations are kept."""
    plans: list[PackingPlan] = []
    train = shared.train

    async def short_of_memory(task: TrainTask | SftTask, on_progress: Callable[[int, int], None]) -> Trained:
        plans.append(PackingPlan(task.token_budget or 0, bool(task.checkpointing)))
        assert rooms.jobs.plan(task.task_id) == plans[-1], "stored first"
        if not plans[-1].checkpointing:
            assert shared._process is not None
            os.kill(shared._process.pid, signal.SIGKILL)
        return await train(task, on_progress)

    monkeypatch.setattr(shared, "train", short_of_memory)
    rooms.runner.start()
    job = await ended(rooms, await rooms.runner.submit(prepare(rooms, "k", calls=4)))
    assert job.state == "finished"
    assert plans == [PackingPlan(64, False), PackingPlan(64, False), PackingPlan(64, True)]
    assert on_disk(rooms) == rooms.policies.directories()


async def test_a_worker_that_is_killed_with_the_smallest_plan_fails_the_job(
    rooms: Rooms, shared: SharedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets: list[int] = []

    async def killed(task: TrainTask | SftTask, on_progress: Callable[[int, int], None]) -> Trained:
        budgets.append(task.token_budget or 0)
        raise WorkerKilled("exit code -9")

    monkeypatch.setattr(shared, "train", killed)
    rooms.runner.start()
    job = await ended(rooms, await rooms.runner.submit(prepare(rooms, "k")))  # calls of 15 tokens
    assert (job.state, job.error) == ("failed", "exit code -9")
    assert budgets == [64] * 4 + [32] * 2 + [16] * 2 + [8] * 2 + [4] * 3


# -- warm-up, reference, teacher --------------------------------------------------------------------------------------


def fine_tuning(rooms: Rooms, key: str) -> SftSubmission:
    """Two recorded calls of another model to learn from, one that is half, and one that nobody knows."""
    known = [
        recorded(
            f"{key}-{number}",
            policy=None,
            version=None,
            untrainable="base_model",
            sampled_ids=[5, 6, number],
            logprobs=[-3.0] * 3,
        )
        for number in (8, 9)
    ]
    rooms.calls.save([*known, recorded(f"{key}-half", status="abandoned")])
    names = [*(call.call_id for call in known), f"{key}-half", f"{key}-unknown"]
    config = SftConfig(epochs=3, batch_size=1, learning_rate=1e-2)
    examples = [RecordedExample(call_id=name) for name in names]
    return SftSubmission(idempotency_key=key, policy="desk", examples=examples, config=config)


async def test_fine_tuning_then_rl_that_stays_close_to_it(rooms: Rooms, shared: SharedTrainer) -> None:
    body = fine_tuning(rooms, "warm-up")
    async with rooms.served() as url, httpx.AsyncClient(verify=False, base_url=url, timeout=60) as http:
        nobody = await http.post("/api/sft", json=body.model_dump() | {"policy": "nobody"})
        assert nobody.status_code == 404
        assert "nobody" in nobody.text
        answer = await http.post("/api/sft", json=body.model_dump())
        assert answer.status_code == 202
        assert (await http.post("/api/sft", json=body.model_dump())).json() == answer.json()
        job = Job.model_validate(answer.json())
        assert job.kind == "sft"
        rooms.runner.start()
        job = await ended(rooms, job)
        again = (await http.post("/api/sft", json=body.model_dump())).json()
        assert (again["id"], again["state"]) == (job.id, "finished")
    assert (job.state, job.error) == ("finished", None)
    assert job.result is not None
    (update,) = job.result.updates
    assert (update.policy, update.parent, update.version, update.calls, update.trained_tokens) == ("desk", 0, 1, 2, 6)
    assert len(update.losses) == 6
    assert update.losses[-1] < update.losses[0]
    assert job.result.skipped == {"example:abandoned": 1, "example:not_recorded": 1}
    assert rooms.policies.get("desk").version == 1
    assert set(rooms.stub.adapters) == {"desk@1"}

    config = TrainConfig(kl=0.1, kl_reference={"desk": 1}, minibatches=1)
    first = await ended(rooms, await rooms.runner.submit(prepare(rooms, "k1", config=config)))
    second = await ended(rooms, await rooms.runner.submit(prepare(rooms, "k2", config=config)))
    for job, version in ((first, 2), (second, 3)):
        assert job.state == "finished", job.error
        assert job.result is not None
        (update,) = job.result.updates
        assert (update.version, update.metrics["step"]) == (version, version - 1), "RL counts its own steps"
        if version == 2:
            assert update.metrics["kl"] == 0, "the first update starts from the reference itself"
        else:
            assert update.metrics["kl"] > 0


async def test_fine_tuning_on_nothing_fails_and_says_why(rooms: Rooms) -> None:
    rooms.runner.start()
    examples = [RecordedExample(call_id="unknown")]
    body = SftSubmission(idempotency_key="s", policy="desk", examples=examples)
    job = await ended(rooms, await rooms.runner.submit(body))
    assert job.state == "failed"
    assert "no example is left to fine-tune policy desk on (1 example:not_recorded)" in (job.error or "")


async def test_a_reference_that_does_not_exist_fails_the_job_and_names_what_does(rooms: Rooms) -> None:
    rooms.runner.start()
    for key, reference, message in (
        ("a", {"desk": 7}, "kl_reference: policy 'desk' has no version 7; it has 0"),
        ("b", {"boss": 0}, "kl_reference: no policy is called 'boss'; there are clerk, desk"),
    ):
        config = TrainConfig(kl=0.1, kl_reference=reference)
        job = await ended(rooms, await rooms.runner.submit(prepare(rooms, key, config=config)))
        assert (job.state, job.error) == ("failed", message)
    assert rooms.policies.head("desk").latest == 0


async def test_distillation(stub: StubEngine, tmp_path: Path, model_dir: Path, shared: SharedTrainer) -> None:
    vllm = StubVllm(max_model_len=64)
    async with serving(vllm.app()) as url:
        teachers = [TeacherAddress("big", url, None), TeacherAddress("away", "http://127.0.0.1:9", None)]
        async with opened(tmp_path, stub, model_dir, shared, teachers) as rooms:
            rooms.runner.start()

            async def trained(key: str, teacher: str, **options: Any) -> Job:
                config = TrainConfig(teacher=teacher, distill=0.5)
                return await ended(rooms, await rooms.runner.submit(prepare(rooms, key, config=config, **options)))

            unknown = await trained("a", "huge")
            assert unknown.state == "failed"
            assert "no teacher is called 'huge' (known: away, big)" in (unknown.error or "")
            away = await trained("b", "away")
            assert away.state == "failed"
            assert "teacher 'away' at http://127.0.0.1:9 does not answer" in (away.error or "")
            assert rooms.policies.head("desk").latest == 0

            job = await trained("c", "big", calls=3)
            assert job.state == "finished", job.error
            assert job.result is not None
            assert job.result.seconds["teacher"] > 0
            assert job.result.updates[0].metrics["teacher_kl"] > 0
            assert len(vllm.asked) == 6
