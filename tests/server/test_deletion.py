"""A run is deleted everywhere by its id; what cannot be taken back is named."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from langgraph_art import AsyncClient
from langgraph_art.errors import ServerRefused
from langgraph_art.protocol import (
    HEADER_CALL,
    HEADER_RUN,
    CallClaim,
    DeletedRun,
    GroupSubmission,
    RecordedExample,
    RunSubmission,
    SftSubmission,
    Submission,
    TrainResult,
)
from langgraph_art_server.storage.calls import CallStore
from langgraph_art_server.storage.database import Database
from langgraph_art_server.storage.jobs import NewVersion
from langgraph_art_server.storage.prompts import pack

from .records import recorded
from .rooms import Rooms
from .stub_engine import BEFORE, Answer

RESULT = TrainResult(updates=[], skipped={}, seconds={})


def submission(*run_ids: str, key: str = "k1") -> Submission:
    runs = [
        RunSubmission(run_id=run_id, reward=1.0, calls=[CallClaim(call_id=f"{run_id}-c", node="plan", delivered=True)])
        for run_id in run_ids
    ]
    return Submission(idempotency_key=key, groups=[GroupSubmission(group_id="g1", runs=runs)])


def nothing(run_id: str) -> DeletedRun:
    return DeletedRun(run_id=run_id, calls=0, pins=0, jobs=0, trained_into=[])


async def test_a_run_goes_and_the_others_stay(rooms: Rooms) -> None:
    rooms.calls.save([recorded("r1-c"), recorded("r1-c", attempt=1), recorded("r2-c", run_id="r2")])
    rooms.policies.pin("r1", "desk")
    rooms.policies.pin("r2", "desk")
    rooms.policies.pin("g1", "clerk")
    job = rooms.jobs.add(submission("r1", "r2"))
    rooms.jobs.commit(job.id, RESULT, [NewVersion("desk", 1, 0, "checkpoints/desk/1-x", ["r1", "r2"])])
    rooms.jobs.finish(job.id, RESULT)
    stays = RecordedExample(call_id="r2-c")
    examples = [RecordedExample(call_id="r1-c"), stays, RecordedExample(call_id="other", run_id="r1")]
    sft = rooms.jobs.add(SftSubmission(idempotency_key="k2", policy="desk", examples=examples))
    rooms.jobs.finish(sft.id, RESULT)

    async with rooms.served() as url, AsyncClient(url) as client:
        deleted = await client.delete_run("r1")
        assert deleted == DeletedRun(run_id="r1", calls=2, pins=1, jobs=2, trained_into=["desk@1"])
        assert await client.calls("r1") == []
        assert len(await client.calls("r2")) == 1
        assert await client.delete_run("r1") == nothing("r1").model_copy(update={"trained_into": ["desk@1"]})
        assert await client.delete_run("nobody") == nothing("nobody")

    assert rooms.policies.pin("r2", "desk") == 0
    assert [run.run_id for run in rooms.jobs.submission(job.id).groups[0].runs] == ["r2"]
    assert rooms.jobs.submission(sft.id).examples == [stays]
    assert rooms.jobs.add(submission("r1", "r2")).id == job.id, "its key still answers with the job"
    assert rooms.jobs.already_trained(["r1", "r2"]) == {("r1", "desk"), ("r2", "desk")}


async def test_a_run_that_a_job_is_to_train_is_refused(rooms: Rooms) -> None:
    rooms.calls.save([recorded("r1-c")])
    job = rooms.jobs.add(submission("r1"))
    async with rooms.served() as url, AsyncClient(url) as client:
        for state in ("queued", "running"):
            with pytest.raises(ServerRefused, match=f"run r1 is in job {job.id}, which is {state}") as refused:
                await client.delete_run("r1")
            assert (refused.value.status, refused.value.code) == (409, "run_in_use")
            rooms.jobs.begin(job.id)
        assert len(await client.calls("r1")) == 1
        rooms.jobs.fail(job.id, "lost its worker")
        assert (await client.delete_run("r1")).jobs == 1
    again = rooms.jobs.add(submission("r1"))
    assert (again.id, again.state) == (job.id, "queued")
    assert rooms.jobs.submission(job.id) == submission("r1"), "who sends it again gets what was sent"


async def test_a_run_with_an_open_call_is_refused(rooms: Rooms) -> None:
    answer = rooms.stub.next(Answer(wait_at=BEFORE))
    headers = {HEADER_CALL: "r1-c", HEADER_RUN: "r1"}
    body = {"model": "desk", "messages": [{"role": "user", "content": "hi"}]}
    async with rooms.served() as url, AsyncClient(url) as client, httpx.AsyncClient(verify=False, base_url=url) as http:
        call = asyncio.create_task(http.post("/v1/chat/completions", json=body, headers=headers))
        await answer.reached.wait()
        with pytest.raises(ServerRefused, match="run r1 has an open call") as refused:
            await client.delete_run("r1")
        assert (refused.value.status, refused.value.code) == (409, "run_in_use")
        assert await client.delete_run("r2") == nothing("r2")
        answer.go.set()
        assert (await call).status_code == 200
        assert await client.delete_run("r1") == nothing("r1").model_copy(update={"calls": 1, "pins": 1})


def test_no_byte_of_it_stays_in_the_files(tmp_path: Path) -> None:
    store = CallStore(Database(tmp_path / "server.db"))
    ids = list(range(70_000, 70_600))
    store.save([recorded("secret-call", prompt_ids=ids, node="secret-node"), recorded("c2", run_id="r2")])
    pattern = pack(ids)[1:65]

    def files() -> bytes:
        return b"".join(path.read_bytes() for path in sorted(tmp_path.iterdir()))

    assert pattern in files()
    store.delete_run("r1")
    for trace in (pattern, b"secret-call", b"secret-node"):
        assert trace not in files()
    assert store.of_run("r2") == [recorded("c2", run_id="r2")]


def test_of_a_shared_prompt_only_what_others_share_stays(tmp_path: Path) -> None:
    store = CallStore(Database(tmp_path / "server.db"))
    public, secret, other = range(100), range(70_000, 70_300), range(80_000, 80_300)
    kept = recorded("c2", run_id="r2", prompt_ids=[*public, *other])
    store.save([recorded("c1", prompt_ids=[*public, *secret]), kept, recorded("c3", prompt_ids=[*public, *other, 7])])

    def files() -> bytes:
        return b"".join(path.read_bytes() for path in sorted(tmp_path.iterdir()))

    assert pack(secret)[1:] in files()
    store.delete_run("r1")
    assert pack(secret)[1:20] not in files()
    assert store.of_run("r2") == [kept]
    store.delete_run("r2")
    for gone in (other, public):
        assert pack(gone)[1:20] not in files()
