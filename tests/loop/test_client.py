"""The HTTP client over a real connection: its operations, and what it does when things go wrong."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from langgraph_art.client import AsyncClient, Client
from langgraph_art.errors import (
    ArtError,
    NothingToTrain,
    RewardError,
    ServerRefused,
    ServerUnreachable,
    TrainingFailed,
)
from langgraph_art.protocol import Job, LoraConfig, TrainConfig
from langgraph_art.runs import GraphRun, NodeCall, RunError, RunGroup
from langgraph_art.settings import is_loopback
from langgraph_art.submissions import make_submission

from .stub_server import StubServer


def run(run_id: str, reward: float | None, *, infrastructure: bool | None = None) -> GraphRun:
    now = datetime.now(UTC)
    calls = [
        NodeCall(
            call_id=f"{run_id}-1", node="clerk", model="desk", messages=[], started_at=now, delivered=True, art=True
        ),
        NodeCall(call_id=f"{run_id}-2", node="clerk", model="desk", messages=[], started_at=now, art=True),
        NodeCall(call_id=f"{run_id}-3", node="judge", model="gpt", messages=[], started_at=now, delivered=True),
    ]
    error = None
    if infrastructure is not None:
        error = RunError(type="openai.APIError", message="boom", node="clerk", infrastructure=infrastructure)
    return GraphRun(run_id=run_id, reward=reward, calls=calls, error=error)


def groups(*rewards: float) -> list[RunGroup]:
    return [RunGroup(group_id="g", runs=[run(f"r{i}", reward) for i, reward in enumerate(rewards)])]


# -- submissions ------------------------------------------------------------------------------------------------------


def test_a_submission_holds_structure_and_rewards_only() -> None:
    submission, skipped = make_submission(groups(0.0, 1.0))
    assert skipped == {}
    sent = submission.groups[0].runs[1]
    assert (sent.run_id, sent.reward) == ("r1", 1.0)
    claims = [(claim.call_id, claim.node, claim.delivered) for claim in sent.calls]
    assert claims == [("r1-1", "clerk", True), ("r1-2", "clerk", False)], "other models' calls are not claimed"


def test_node_rewards_are_submitted_with_their_run() -> None:
    given = groups(0.0, 1.0)
    given[0].runs[1].node_rewards = {"clerk": 0.5}
    runs = make_submission(given)[0].groups[0].runs
    assert [sent.node_rewards for sent in runs] == [{}, {"clerk": 0.5}]
    given[0].runs[0].node_rewards = {"clerk": math.nan}
    with pytest.raises(RewardError, match="Run r0 has the reward nan at node 'clerk'"):
        make_submission(given)


def test_runs_with_an_infrastructure_error_are_left_out_and_counted() -> None:
    broken, caused = run("broken", None, infrastructure=True), run("caused", 0.0, infrastructure=False)
    given = [RunGroup(group_id="g", runs=[broken, caused, run("fine", 1.0)])]
    submission, skipped = make_submission(given)
    assert [sent.run_id for sent in submission.groups[0].runs] == ["caused", "fine"]
    assert skipped == {"run:infrastructure_error": 1}


@pytest.mark.parametrize(("reward", "words"), [(None, "no reward"), (math.nan, "reward nan"), (math.inf, "reward inf")])
def test_a_run_without_a_finite_reward_is_refused_by_name(reward: float | None, words: str) -> None:
    given = [RunGroup(group_id="g", runs=[run("fine", 1.0), run("odd-one", reward)])]
    with pytest.raises(RewardError, match=f"Run odd-one has .*{words}") as caught:
        make_submission(given)
    assert caught.value.groups == given


def test_nothing_to_train_says_why() -> None:
    with pytest.raises(NothingToTrain, match="groups are empty"):
        make_submission([])
    broken = [RunGroup(group_id="g", runs=[run("a", None, infrastructure=True)])]
    with pytest.raises(NothingToTrain, match=r"1 of 1 runs failed .* openai.APIError: boom"):
        make_submission(broken)


def test_a_run_or_call_that_is_there_twice_is_named() -> None:
    given = groups(0, 1)
    with pytest.raises(ArtError, match=r"cannot be submitted: .*run r0 is in the submission 2 times"):
        make_submission(given + given)
    given[0].runs[1].calls[1].call_id = "r0-1"
    with pytest.raises(ArtError, match="call r0-1 is in the submission 2 times"):
        make_submission(given)
    with pytest.raises(ArtError, match=r"idempotency_key: .* at most 128 characters"):
        make_submission(groups(0, 1), idempotency_key="k" * 129)


def test_nothing_that_is_there_twice_reaches_the_server(stub: StubServer) -> None:
    with Client() as client, pytest.raises(ArtError, match="run r0"):
        client.train(groups(0, 1) + groups(0, 1))
    body = make_submission(groups(0, 1))[0].model_dump(mode="json")
    body["groups"] *= 2
    assert httpx.post(f"{stub.url}/api/submissions", json=body, trust_env=False).status_code == 422
    assert stub.jobs == {}


def test_the_default_key_depends_on_runs_and_config() -> None:
    def key(**options: Any) -> str:
        return make_submission(**{"groups": groups(0, 1), **options})[0].idempotency_key

    assert key() == key() == key(config=TrainConfig())
    assert len({key(), key(groups=groups(0, 1, 2)), key(config=TrainConfig(learning_rate=1e-5))}) == 3
    assert key(idempotency_key="mine") == "mine"


# -- operations, in both forms ----------------------------------------------------------------------------------------


def test_policies(stub: StubServer) -> None:
    with Client() as client:
        assert client.policies.list() == []
        made = client.policies.create("desk", LoraConfig(rank=4))
        assert client.policies.create("desk", LoraConfig(rank=4)) == made, "a second time is a no-op"
        assert client.policies.get("desk") == made == client.policies.list()[0]
        with pytest.raises(ServerRefused, match="another shape") as conflict:
            client.policies.create("desk")
        assert (conflict.value.status, conflict.value.code) == (409, "conflict")
        with pytest.raises(ServerRefused, match=r"no policy dask; there are \['desk'\]"):
            client.policies.get("dask")
        with pytest.raises(ArtError, match="'a@1' is no policy name"):
            client.policies.create("a@1")
        assert client.calls("run") == []


def test_train_waits_and_reports(stub: StubServer) -> None:
    seen: list[tuple[str, int]] = []
    with Client() as client:
        client.policies.create("desk")
        given = [*groups(0, 1), RunGroup(group_id="h", runs=[run("x", None, infrastructure=True)])]
        result = client.train(given, on_progress=lambda job: seen.append((job.state, job.done)))
    assert [(update.policy, update.version) for update in result.updates] == [("desk", 1)]
    assert result.skipped == {"group:no_signal": 1, "run:infrastructure_error": 1}
    assert seen == [("queued", 0), ("running", 1), ("running", 2), ("finished", 3)]


async def test_the_async_form_is_the_same(stub: StubServer) -> None:
    seen: list[int] = []
    async with AsyncClient() as client:
        assert (await client.info()).base_model == "base"
        made = await client.policies.create("desk")
        assert await client.policies.list() == [made]
        assert await client.policies.get("desk") == made
        job = await client.submit(groups(0, 1))
        assert (await client.job(job.id)).state == "queued"
        assert (await client.wait(job.id, lambda job: seen.append(job.done))).state == "finished"
        assert (await client.train(groups(0, 1))).updates[0].version == 1, "the same runs are the same job"
        assert await client.calls("run") == []
    assert seen == [0, 1, 2, 3]
    assert len(stub.jobs) == 1


async def test_the_blocking_form_works_inside_a_running_loop(stub: StubServer) -> None:
    with Client() as client:
        assert client.info().engine == "ready"


def test_the_same_key_with_another_body_is_refused(stub: StubServer) -> None:
    with Client() as client:
        client.submit(groups(0, 1), idempotency_key="k")
        with pytest.raises(ServerRefused, match="used for another submission") as caught:
            client.submit(groups(1, 1), idempotency_key="k")
    assert caught.value.status == 409
    assert stub.requests.count("POST /api/submissions") == 2, "a refusal is not retried"


def test_a_failed_job_raises_the_servers_reason(stub: StubServer) -> None:
    stub.fail = "out of memory: lower the token budget"
    again = r"(?s)Job job-0 .*lower the token budget.*Call client.train again with the same groups"
    with Client() as client, pytest.raises(TrainingFailed, match=again):
        client.train(groups(0, 1))


async def test_a_job_that_is_not_serving_yet_is_waited_for_with_a_warning(
    stub: StubServer, caplog: pytest.LogCaptureFixture
) -> None:
    stub.not_serving = "the adapter could not be loaded"
    seen: list[Job] = []
    async with AsyncClient() as client:
        training = asyncio.ensure_future(client.train(groups(0, 1), on_progress=seen.append))
        while len(seen) < 6:
            await asyncio.sleep(0.02)
        stub.not_serving = "no memory for the adapter"
        while len(seen) < 9:
            await asyncio.sleep(0.02)
        stub.not_serving = None
        assert (await training).skipped == {"group:no_signal": 1}
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [
        "job job-0 is trained but not serving yet: the adapter could not be loaded",
        "job job-0 is trained but not serving yet: no memory for the adapter",
    ]


@pytest.mark.parametrize("late", [False, True])
def test_a_job_whose_engine_has_failed_is_not_waited_for(stub: StubServer, late: bool) -> None:
    stub.not_serving = "the adapter could not be loaded"
    reports: list[Job] = []

    def fail_later(job: Job) -> None:
        reports.append(job)
        if len(reports) == (6 if late else 1):
            stub.engine = "failed"

    says = r"Job job-0 is trained but not serving: the adapter .*out of memory.*restart the server, which will serve it"
    with Client() as client:
        with pytest.raises(TrainingFailed, match=says):
            client.train(groups(0, 1), on_progress=fail_later)
        stub.engine, stub.not_serving = "ready", None
        assert client.wait("job-0").state == "finished", "as after a restart"


def test_a_silent_stream_does_not_hide_that_the_engine_has_failed(stub: StubServer) -> None:
    """The server reports changes only; between them it sends comments."""
    stub.not_serving, stub.silent = "the adapter could not be loaded", True

    def fail(job: Job) -> None:
        if job.state == "trained":
            threading.Timer(0.3, setattr, (stub, "engine", "failed")).start()

    with Client() as client, pytest.raises(TrainingFailed, match="restart the server"):
        client.train(groups(0, 1), on_progress=fail)
    assert sum(request.endswith("/events") for request in stub.requests) == 1


@pytest.fixture
def closed_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that names a proxy on which nobody listens."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.lower(), "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)


@pytest.mark.usefixtures("closed_proxy")
async def test_no_proxy_stands_before_a_server_on_this_machine(stub: StubServer) -> None:
    with Client() as client:
        assert client.info().engine == "ready"
    async with AsyncClient(stub.url.replace("127.0.0.1", "localhost")) as there:
        assert (await there.info()).engine == "ready"


def test_other_servers_are_reached_through_the_proxy(stub: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", stub.url)
    monkeypatch.setenv("http_proxy", stub.url)
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("no_proxy", "")
    with Client("http://gpu-box.invalid:7373") as client:
        assert client.info().engine == "ready", "the stub takes the proxy's place"


@pytest.mark.parametrize(
    ("url", "loopback"),
    [
        ("http://127.0.0.1:7373/v1", True),
        ("http://127.9.9.9", True),
        ("https://[::1]:7373", True),
        ("http://LOCALHOST:7373", True),
        ("http://gpu.localhost", True),
        ("http://10.0.0.1:7373", False),
        ("http://127.0.0.1.example.org", False),
        ("http://localhost@example.org", False),
        ("", False),
    ],
)
def test_what_is_on_this_machine(url: str, loopback: bool) -> None:
    assert is_loopback(url) is loopback


def test_the_api_key_is_sent_and_never_shown(stub: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.api_key = "sesame"
    with Client(api_key="wrong-key") as client, pytest.raises(ServerRefused, match="missing or wrong") as caught:
        client.info()
    assert "wrong-key" not in str(caught.value)
    with Client(api_key="sesame") as client:
        assert client.info().base_model == "base"
    monkeypatch.setenv("LANGGRAPH_ART_API_KEY", "sesame")
    with Client() as client:
        assert client.info().base_model == "base"


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_server_that_is_down_is_named_soon(stub: StubServer) -> None:
    stub.stop()
    started = time.monotonic()
    with Client() as client, pytest.raises(ServerUnreachable, match=rf"{stub.url} .*langgraph-art serve"):
        client.info()
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("wait", ["0", "1"])
def test_a_busy_server_is_asked_again_when_it_says(stub: StubServer, wait: str) -> None:
    stub.busy, stub.retry_after = 2, wait
    started = time.monotonic()
    with Client() as client:
        assert client.info().engine == "ready"
    assert len(stub.requests) == 3
    assert 2 * int(wait) <= time.monotonic() - started < 2 * int(wait) + 2


def test_a_server_that_stays_busy_ends_in_its_own_words(stub: StubServer) -> None:
    stub.busy = 1000
    with Client(patience=0.3) as client, pytest.raises(ServerRefused, match="engine is restarting") as caught:
        client.info()
    assert caught.value.status == 503


def _drop(stub: StubServer) -> None:
    stub.drop_streams = 2


def _end(stub: StubServer) -> None:
    stub.end_streams = 2


@pytest.mark.parametrize("break_off", [_drop, _end])
def test_a_lost_event_stream_is_resumed(stub: StubServer, break_off: Callable[[StubServer], None]) -> None:
    stub.packs = 5
    break_off(stub)
    done: list[int] = []
    with Client() as client:
        job = client.wait(client.submit(groups(0, 1)).id, lambda job: done.append(job.done))
    assert job.state == "finished"
    assert sum(request.endswith("/events") for request in stub.requests) == 3
    assert done[-1] == 5
    assert done == sorted(done), "progress never goes back"


def test_waiting_survives_a_restart_of_the_server(stub: StubServer) -> None:
    stub.drop_streams = 1

    def restart_once(job: Job) -> None:
        if job.done == 1 and threads == []:
            threads.append(threading.Thread(target=restart))
            stub.stop()
            threads[0].start()

    def restart() -> None:
        time.sleep(0.7)
        stub.start(stub.port)

    threads: list[threading.Thread] = []
    with Client() as client:
        assert client.wait(client.submit(groups(0, 1)).id, restart_once).state == "finished"
    threads[0].join()


def test_a_server_that_vanishes_while_waiting_is_reported(stub: StubServer) -> None:
    with Client(patience=0.5) as client:
        job = client.submit(groups(0, 1))
        stub.stop()
        with pytest.raises(ServerUnreachable, match="langgraph-art serve"):
            client.wait(job.id)


def test_waiting_for_a_server_is_said_once(
    stub: StubServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.busy = 3
    with Client() as client:
        client.info()
        said = [record.getMessage() for record in caplog.records if record.name == "langgraph_art.client"]
        assert said == [f"the server at {stub.url} is busy or restarting; waiting for it, 60 s at most"]
    caplog.clear()
    monkeypatch.setattr("langgraph_art.client._FIRST_CONTACT_PATIENCE", 0.1)
    with Client(patience=0.6) as client:
        client.info()
        stub.stop()
        with pytest.raises(ServerUnreachable):
            client.info()
    said = [record.getMessage() for record in caplog.records if record.name == "langgraph_art.client"]
    assert said == [f"the server at {stub.url} does not answer; waiting for it, 1 s at most"]


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_url_may_be_the_gateways(stub: StubServer, suffix: str) -> None:
    with Client(stub.url + suffix) as client:
        assert client.url == stub.url
        assert client.info().engine == "ready"


def test_a_url_without_a_scheme_is_named() -> None:
    with pytest.raises(ArtError, match="must start with http"):
        Client("gpu-box:7373")


def test_another_protocol_is_named(stub: StubServer) -> None:
    stub.protocol = 99
    with Client() as client, pytest.raises(ServerRefused, match="speaks protocol 99, this client protocol 1"):
        client.info()


def test_something_else_at_that_address_is_named(stub: StubServer) -> None:
    with Client(f"{stub.url}/openapi.json#") as client, pytest.raises(ServerRefused):
        client.info()
    with Client(f"{stub.url}/docs?x=") as client, pytest.raises(ServerRefused, match="no langgraph-art answer"):
        client.info()


async def test_cancelling_an_async_wait_returns_at_once(stub: StubServer) -> None:
    stub.packs = 10**9
    async with AsyncClient() as client:
        job = await client.submit(groups(0, 1))
        waiting = asyncio.ensure_future(client.wait(job.id))
        await asyncio.sleep(0.2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
