"""Calls over real HTTP, from the client through the gateway to an engine that waits, dies or refuses when told to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable
from typing import Any
from urllib.parse import quote

import httpx
import openai
import orjson
import pytest

from langgraph_art.protocol import (
    HEADER_CALL,
    HEADER_GROUP,
    HEADER_NODE,
    HEADER_RETRY,
    HEADER_RUN,
    HEADER_VERSION,
    RecordedCall,
)

from .rooms import Rooms, eventually
from .stub_engine import BEFORE, PIECE, Answer, logprob, prompt_ids, text_ids

CHAT = "/v1/chat/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "where is my order"}]
BODY = {"model": "desk", "messages": MESSAGES}
HEADERS = {HEADER_CALL: "c1", HEADER_RUN: "r1", HEADER_GROUP: "g1", HEADER_NODE: quote("plan|model", safe="")}
IDS = [11, 12, 13, 14]


@pytest.fixture
async def http(rooms: Rooms) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        rooms.served() as url,
        httpx.AsyncClient(verify=False, base_url=url, timeout=20, headers=HEADERS) as client,
    ):
        yield client


@pytest.fixture
async def sdk(http: httpx.AsyncClient) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="-", default_headers=HEADERS) as client:
        yield client


async def recorded(http: httpx.AsyncClient, run_id: str = "r1") -> list[RecordedCall]:
    answer = await http.get(f"/api/runs/{run_id}/calls")
    return [RecordedCall.model_validate(call) for call in answer.json()]


async def one_record(rooms: Rooms, call_id: str = "c1") -> RecordedCall:
    await eventually(lambda: rooms.calls.of_ids([call_id]))
    record: RecordedCall
    (record,) = rooms.calls.of_ids([call_id])[call_id]
    return record


def events(text: str) -> list[dict[str, Any] | None]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [None if line == "[DONE]" else orjson.loads(line) for line in lines]


async def nothing_is_held(rooms: Rooms) -> None:
    """An update can run now, and no version is kept loaded."""
    async with asyncio.timeout(5), rooms.compute.update():
        assert rooms.stub.computing == 0
    assert not rooms.adapters._leases
    await rooms.gateway.wait_closed(["c1"], 5)
    assert not rooms.gateway._open


# -- answers ----------------------------------------------------------------------------------------------------------


async def test_a_whole_answer(rooms: Rooms, http: httpx.AsyncClient, sdk: openai.AsyncOpenAI) -> None:
    raw = await sdk.chat.completions.with_raw_response.create(model="desk", messages=MESSAGES, temperature=0.7)
    answer = raw.parse()
    assert raw.headers[HEADER_VERSION] == answer.model == "desk@0"
    assert answer.choices[0].message.content == PIECE * 4
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert "token_ids" not in raw.text
    (record,) = await recorded(http)
    assert (record.prompt_ids, record.sampled_ids) == (prompt_ids(MESSAGES), IDS)
    assert record.logprobs == [logprob(token) for token in IDS]
    assert (record.policy, record.version, record.model, record.status) == ("desk", 0, "desk", "complete")
    assert (record.run_id, record.node, record.attempt, record.untrainable) == ("r1", "plan|model", 0, None)
    assert record.sampling == {"temperature": 0.7}
    await nothing_is_held(rooms)


async def test_a_streamed_answer(rooms: Rooms, http: httpx.AsyncClient, sdk: openai.AsyncOpenAI) -> None:
    rooms.add_version("desk")
    stream = await sdk.chat.completions.create(model="desk", messages=MESSAGES, stream=True)
    assert stream.response.headers[HEADER_VERSION] == "desk@1"
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == PIECE * 4
    assert {chunk.model for chunk in chunks} == {"desk@1"}
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None and chunk.choices[0].logprobs is None for chunk in chunks)
    (record,) = await recorded(http)
    assert (record.prompt_ids, record.sampled_ids, record.version) == (prompt_ids(MESSAGES), IDS, 1)
    assert record.logprobs == [logprob(token) for token in IDS]
    await nothing_is_held(rooms)


async def test_usage_of_a_stream_for_those_who_ask(http: httpx.AsyncClient) -> None:
    body = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
    answer = await http.post(CHAT, json=body)
    *_, usage, done = events(answer.text)
    assert done is None
    assert usage is not None
    assert usage["usage"]["completion_tokens"] == 4


async def test_the_base_model_can_be_called(http: httpx.AsyncClient) -> None:
    answer = await http.post(CHAT, json={**BODY, "model": "tiny"})
    assert answer.json()["model"] == "tiny"
    assert HEADER_VERSION not in answer.headers
    (record,) = await recorded(http)
    assert (record.policy, record.version, record.untrainable) == (None, None, "base_model")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_record_is_there_before_the_answer_is_whole(
    rooms: Rooms, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    save, saving, disk = rooms.calls.save, threading.Event(), threading.Event()

    def slow_save(calls: Iterable[RecordedCall]) -> None:
        saving.set()
        assert disk.wait(10)
        save(calls)

    monkeypatch.setattr(rooms.calls, "save", slow_save)
    lines: list[str] = []

    async def read() -> None:
        async with http.stream("POST", CHAT, json={**BODY, "stream": stream}) as answer:
            async for line in answer.aiter_lines():
                lines.append(line)

    reading = asyncio.create_task(read())
    await eventually(saving.is_set)
    if stream:
        # The role and all tokens but the one that ends the answer.
        await eventually(lambda: len(events("\n".join(lines))) == 4)
    assert (await http.get("/health")).status_code == 200  # as good a moment as any for the rest to slip through
    assert len(events("\n".join(lines))) == (4 if stream else 0)
    assert not reading.done()
    assert not stream or 'finish_reason":"stop' not in "".join(lines)
    disk.set()
    async with asyncio.timeout(10):
        await reading
    if stream:
        assert len(events("\n".join(lines))) == 6
    assert (await one_record(rooms)).status == "complete"


@pytest.mark.parametrize("stream", [False, True])
async def test_two_choices(http: httpx.AsyncClient, stream: bool) -> None:
    answer = await http.post(CHAT, json={**BODY, "n": 2, "stream": stream})
    parts = [part for part in events(answer.text) if part] if stream else [answer.json()]
    texts = {0: "", 1: ""}
    for part in parts:
        for choice in part["choices"]:
            texts[choice["index"]] += (choice.get("message") or choice.get("delta"))["content"]
    assert texts == {0: PIECE * 4, 1: PIECE * 4}
    records = sorted(await recorded(http), key=lambda record: record.choice)
    assert [(record.choice, record.untrainable) for record in records] == [(0, None), (1, "unused_choice")]
    assert [record.sampled_ids for record in records] == [IDS, IDS]


# -- limits and refusals ----------------------------------------------------------------------------------------------


async def test_an_answer_without_a_limit_gets_the_default_cut_to_the_context(
    rooms: Rooms, http: httpx.AsyncClient
) -> None:
    for body in (BODY, {**BODY, "max_tokens": 3}, {**BODY, "max_completion_tokens": 2}):
        assert (await http.post(CHAT, json=body)).status_code == 200
    default, tokens, completion = rooms.stub.bodies(CHAT)
    assert (default["max_completion_tokens"], default.get("max_tokens")) == (rooms.stub.max_model_len, None)
    assert (tokens["max_tokens"], "max_completion_tokens" in tokens) == (3, False)
    assert (completion["max_completion_tokens"], "max_tokens" in completion) == (2, False)
    assert (await recorded(http))[-1].sampled_ids == IDS[:2]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_is_too_long_is_told_where_and_by_how_much(
    rooms: Rooms, http: httpx.AsyncClient, stream: bool
) -> None:
    messages = [{"role": "user", "content": "word " * 99}]
    answer = await http.post(CHAT, json={**BODY, "messages": messages, "stream": stream})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "'plan|model'" in error["message"]
    assert "it has 100 tokens, the context holds 64" in error["message"]
    await nothing_is_held(rooms)


async def test_what_the_engine_refuses_is_said_with_its_reason(rooms: Rooms, http: httpx.AsyncClient) -> None:
    rooms.stub.next(Answer(status=422, message="temperature must be a number"))
    answer = await http.post(CHAT, json={**BODY, "stream": True})
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "engine_refused")
    assert "'plan|model': temperature must be a number" in answer.json()["error"]["message"]
    await nothing_is_held(rooms)


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"{", 400, "invalid_request"),
        (b"[]", 400, "invalid_request"),
        (b'{"messages": []}', 400, "model_not_found"),
        (b'{"model": "nobody", "messages": []}', 404, "model_not_found"),
    ],
)
async def test_a_request_that_cannot_be_right(
    rooms: Rooms, http: httpx.AsyncClient, content: bytes, status: int, code: str
) -> None:
    answer = await http.post(CHAT, content=content)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert rooms.stub.requests == []
    await nothing_is_held(rooms)


async def test_a_version_that_cannot_be_loaded_is_busy_not_wrong(rooms: Rooms, http: httpx.AsyncClient) -> None:
    rooms.add_version("desk")
    rooms.stub.refuse_loads.append((500, "no memory"))
    answer = await http.post(CHAT, json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "adapter_not_loaded")
    await nothing_is_held(rooms)
    assert (await http.post(CHAT, json=BODY)).status_code == 200


# -- a client that goes away ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stream", "wait_at", "sampled"),
    [
        pytest.param(False, BEFORE, [], id="whole"),
        pytest.param(True, BEFORE, [], id="before-the-headers"),
        pytest.param(True, 0, [], id="before-the-first-chunk"),
        pytest.param(True, 3, [11, 12], id="mid-stream"),
    ],
)
async def test_a_client_that_vanishes_ends_the_engines_work(
    rooms: Rooms, http: httpx.AsyncClient, stream: bool, wait_at: int, sampled: list[int]
) -> None:
    rooms.add_version("desk")
    answer = rooms.stub.next(Answer(wait_at=wait_at))
    lines: list[str] = []
    headers = asyncio.Event()

    async def call() -> None:
        async with http.stream("POST", CHAT, json={**BODY, "stream": stream}) as response:
            headers.set()
            async for line in response.aiter_lines():
                lines.append(line)

    calling = asyncio.create_task(call())
    async with asyncio.timeout(10):
        await answer.reached.wait()
        if wait_at >= 0:
            await headers.wait()
        await eventually(lambda: len(events("\n".join(lines))) == max(wait_at, 0))
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        await answer.aborted.wait()
    await nothing_is_held(rooms)
    record = await one_record(rooms)
    assert (record.status, record.untrainable, record.sampled_ids) == ("abandoned", "abandoned", sampled)
    assert record.logprobs == [logprob(token) for token in sampled]
    assert (record.run_id, record.version) == ("r1", 1)


# -- an engine that goes away -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_dies_before_it_answers(rooms: Rooms, http: httpx.AsyncClient, stream: bool) -> None:
    rooms.stub.next(Answer(die_at=BEFORE))
    answer = await http.post(CHAT, json={**BODY, "stream": stream})
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    error = answer.json()["error"]
    assert error["code"] == "engine_restarting"
    assert "'plan|model'" in error["message"]
    record = await one_record(rooms)
    assert (record.status, record.untrainable, record.sampled_ids) == ("failed", "failed", [])
    await nothing_is_held(rooms)


async def test_an_engine_that_dies_in_the_middle_of_a_whole_answer(rooms: Rooms, http: httpx.AsyncClient) -> None:
    rooms.stub.next(Answer(die_at=0))
    answer = await http.post(CHAT, json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_restarting")
    assert (await one_record(rooms)).status == "failed"
    await nothing_is_held(rooms)


@pytest.mark.parametrize(("die_at", "sampled"), [(0, []), (3, [11, 12])])
async def test_an_engine_that_dies_in_mid_stream(
    rooms: Rooms, http: httpx.AsyncClient, sdk: openai.AsyncOpenAI, die_at: int, sampled: list[int]
) -> None:
    rooms.stub.next(Answer(die_at=die_at))
    answer = await http.post(CHAT, json={**BODY, "stream": True})
    *sent, error = events(answer.text)
    assert len(sent) == die_at
    assert error is not None, "[DONE] would say that the answer is whole"
    assert error["error"]["code"] == "engine_restarting"
    record = await one_record(rooms)
    assert (record.status, record.untrainable, record.sampled_ids) == ("failed", "failed", sampled)
    await nothing_is_held(rooms)
    rooms.stub.next(Answer(die_at=die_at))
    stream = await sdk.chat.completions.create(model="desk", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match=r"the engine went away.*'plan\|model'"):
        async for _ in stream:
            pass


async def test_a_call_waits_while_the_engine_is_restarted(rooms: Rooms, http: httpx.AsyncClient) -> None:
    rooms.engine.crash()
    calling = asyncio.create_task(http.post(CHAT, json=BODY))
    assert (await http.get("/health")).json() == {"status": "starting", "phase": "starting"}
    await eventually(lambda: "c1" in rooms.gateway._open)
    assert not calling.done()
    await rooms.engine.come_back()
    assert (await calling).status_code == 200


async def test_attempts_of_the_sdk_are_records_of_one_call(
    rooms: Rooms, http: httpx.AsyncClient, sdk: openai.AsyncOpenAI
) -> None:
    rooms.stub.next(Answer(status=500, message="out of blocks"))
    answer = await sdk.chat.completions.create(model="desk", messages=MESSAGES)
    assert answer.choices[0].message.content == PIECE * 4
    records = await recorded(http)
    assert {record.call_id for record in records} == {"c1"}
    assert [(record.attempt, record.status) for record in records] == [(0, "failed"), (1, "complete")]


async def test_a_failure_of_the_engine_is_passed_on_as_one_to_try_again(http: httpx.AsyncClient, rooms: Rooms) -> None:
    rooms.stub.next(Answer(status=500, message="out of blocks"))
    answer = await http.post(CHAT, json=BODY, headers={HEADER_RETRY: "2"})
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert "'plan|model': out of blocks" in answer.json()["error"]["message"]
    assert (await one_record(rooms)).attempt == 2
    await nothing_is_held(rooms)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_record_that_cannot_be_written_fails_the_call_and_nothing_hangs(
    rooms: Rooms, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def full_disk(_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(rooms.calls, "save", full_disk)
    async with asyncio.timeout(10):
        answer = await http.post(CHAT, json={**BODY, "stream": stream})
    if stream:
        *_, error = events(answer.text)
        assert error is not None, "[DONE] would say that the answer is whole"
        assert '"finish_reason":"stop"' not in answer.text
    else:
        error = answer.json()
        assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
    assert error["error"]["code"] == "not_recorded"
    assert "'plan|model'" in error["error"]["message"]
    await nothing_is_held(rooms)


async def test_an_answer_that_is_not_understood_ends_the_stream(rooms: Rooms, http: httpx.AsyncClient) -> None:
    rooms.stub.next(Answer(garble_at=2))
    async with asyncio.timeout(10):
        answer = await http.post(CHAT, json={**BODY, "stream": True})
    *sent, error = events(answer.text)
    assert len(sent) == 2
    assert error is not None
    assert "'plan|model'" in error["error"]["message"]
    assert (await one_record(rooms)).status == "abandoned"
    await nothing_is_held(rooms)


# -- taking turns -----------------------------------------------------------------------------------------------------


async def test_a_slow_reader_does_not_hold_the_cores(rooms: Rooms, http: httpx.AsyncClient) -> None:
    # 12 MiB fit into no socket's buffers.
    rooms.stub.next(Answer(ids=[5] * 48, piece="w" * 262_144))
    async with http.stream("POST", CHAT, json={**BODY, "stream": True}) as response:
        async with asyncio.timeout(10), rooms.compute.update():
            assert rooms.stub.computing == 0
        assert "c1" in rooms.gateway._open, "the answer was read before the update began"
        content = (await response.aread()).decode()
    chunks = events(content)
    assert chunks[-1] is None
    assert len(chunks) == 50
    assert len((await one_record(rooms)).sampled_ids) == 48
    await nothing_is_held(rooms)


async def test_calls_that_come_during_an_update_wait_and_none_fails(rooms: Rooms, http: httpx.AsyncClient) -> None:
    rooms.add_version("desk")
    first = rooms.stub.next(Answer(wait_at=3))
    training, trained = asyncio.Event(), asyncio.Event()

    async def update() -> None:
        async with rooms.compute.update():
            assert rooms.stub.computing == 0
            training.set()
            await trained.wait()
            assert rooms.stub.computing == 0, "a call ran during the update"

    async def call(number: int) -> httpx.Response:
        return await http.post(CHAT, json={**BODY, "stream": number % 2 == 0}, headers={HEADER_CALL: f"w{number}"})

    async with asyncio.timeout(20):
        in_flight = asyncio.create_task(http.post(CHAT, json={**BODY, "stream": True}))
        await first.reached.wait()
        updating = asyncio.create_task(update())
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(call(number)) for number in range(32)]
        await eventually(lambda: len(rooms.gateway._open) == 33)
        assert not training.is_set(), "the update did not wait for the call in flight"
        first.go.set()
        assert events((await in_flight).text)[-1] is None
        await training.wait()
        assert (await http.get("/health")).status_code == 200
        assert not any(task.done() for task in waiting)
        trained.set()
        await updating
        answers = await asyncio.gather(*waiting)
    assert [answer.status_code for answer in answers] == [200] * 32
    found = rooms.calls.of_ids([f"w{number}" for number in range(32)])
    assert {call.status for calls in found.values() for call in calls} == {"complete"}
    assert len(found) == 32
    await nothing_is_held(rooms)


async def test_waiting_for_calls_to_close(rooms: Rooms, http: httpx.AsyncClient) -> None:
    answer = rooms.stub.next(Answer(wait_at=2))
    calling = asyncio.create_task(http.post(CHAT, json={**BODY, "stream": True}))
    async with asyncio.timeout(10):
        await answer.reached.wait()
        await rooms.gateway.wait_closed(["another", "c2"], 10)
        await rooms.gateway.wait_closed(["c1"], 0.01)
        assert rooms.calls.of_ids(["c1"]) == {}, "it is still open, the time was over"
        waiting = asyncio.create_task(rooms.gateway.wait_closed(["c2", "c1"], 10))
        await asyncio.sleep(0)
        assert not waiting.done()
        answer.go.set()
        await waiting
        assert rooms.calls.of_ids(["c1"])["c1"][0].status == "complete"
        await calling


# -- token counts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["desk", "desk@0", "desk@1", "tiny"])
async def test_token_ids_are_those_a_call_would_have(rooms: Rooms, http: httpx.AsyncClient, model: str) -> None:
    rooms.add_version("desk")
    body = {"model": model, "messages": MESSAGES, "add_generation_prompt": False}
    answer = await http.post("/tokenize", json=body)
    ids = prompt_ids(MESSAGES)
    assert answer.json() == {"count": len(ids), "tokens": ids, "max_model_len": rooms.stub.max_model_len}
    assert rooms.stub.bodies("/tokenize") == [{**body, "model": "tiny"}]
    assert (await http.post("/tokenize", json={"model": model, "prompt": "a b"})).json()["tokens"] == text_ids("a b")
    assert not rooms.stub.adapters, "no adapter is loaded to count tokens"
    assert await recorded(http) == []


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"model": "nobody", "prompt": "a"}, 404, "model_not_found"),
        ({"model": "desk@7", "prompt": "a"}, 404, "model_not_found"),
        ({"prompt": "a"}, 400, "model_not_found"),
        ({"model": "desk", "messages": []}, 400, "engine_refused"),
        ([], 400, "invalid_request"),
    ],
)
async def test_token_counts_that_are_refused(http: httpx.AsyncClient, body: Any, status: int, code: str) -> None:
    answer = await http.post("/tokenize", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_token_counts_wait_for_the_engine(rooms: Rooms, http: httpx.AsyncClient) -> None:
    rooms.engine.crash()
    asking = asyncio.create_task(http.post("/tokenize", json={"model": "desk", "prompt": "a"}))
    await asyncio.sleep(0.1)
    assert not asking.done()
    await rooms.engine.come_back()
    assert (await asking).status_code == 200
