"""The call store over HTTP: how much it holds, and who does not want to be in it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks import call_store
from langgraph_art import record
from langgraph_art.protocol import HEADER_CALL, HEADER_RECORD, HEADER_RUN, CallStoreInfo

from .records import recorded
from .rooms import Rooms
from .stub_engine import Answer

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "desk", "messages": [{"role": "user", "content": "hi"}]}
HEADERS = {HEADER_CALL: "c1", HEADER_RUN: "r1"}


@pytest.mark.parametrize("stream", [False, True])
async def test_who_asks_for_no_record_gets_the_same_answer_and_no_record(rooms: Rooms, stream: bool) -> None:
    async with rooms.served() as url, httpx.AsyncClient(verify=False, base_url=url, timeout=20) as http:
        answers = []
        for extra in ({HEADER_RECORD: "none"}, {}):
            rooms.stub.next(Answer())
            answer = await http.post(CHAT, json=BODY | {"stream": stream}, headers=HEADERS | extra)
            assert answer.status_code == 200
            answers.append(answer.text)
            assert len(rooms.calls.of_run("r1")) == len(answers) - 1
    assert answers[0] == answers[1]
    assert "token_ids" not in answers[0]


async def test_a_broken_call_that_asked_for_no_record_has_none(rooms: Rooms) -> None:
    rooms.stub.next(Answer(status=500))
    async with rooms.served() as url, httpx.AsyncClient(verify=False, base_url=url, timeout=20) as http:
        answer = await http.post(CHAT, json=BODY, headers=HEADERS | {HEADER_RECORD: "none"})
    assert answer.status_code == 503
    assert rooms.calls.of_run("r1") == []


async def test_another_wish_is_refused(rooms: Rooms) -> None:
    async with rooms.served() as url, httpx.AsyncClient(verify=False, base_url=url) as http:
        answer = await http.post(CHAT, json=BODY, headers=HEADERS | {HEADER_RECORD: "some"})
    assert answer.status_code == 400
    assert f"{HEADER_RECORD}: 'some'" in answer.json()["error"]["message"]


async def test_the_store_says_how_much_it_holds(rooms: Rooms) -> None:
    rooms.calls.save([recorded()])
    async with rooms.served() as url, httpx.AsyncClient(verify=False, base_url=url) as http:
        info = CallStoreInfo.model_validate((await http.get("/api/calls")).json())
    assert (info.calls, info.unclaimed, info.expired) == (1, 1, 0)
    assert info.bytes > 10_000


async def test_the_page_s_model_is_not_recorded(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    async with rooms.served() as url:
        monkeypatch.setenv("LANGGRAPH_ART_URL", url)
        names: dict[str, Any] = {}
        exec(compile(block.replace('"researcher"', '"desk"'), PAGE.name, "exec"), names)
        with record() as run:
            await names["model"].ainvoke("hi")
    assert [call.delivered for call in run.calls] == [True]
    assert rooms.calls.info().calls == 0


@pytest.mark.parametrize("shape", call_store.SHAPES)
def test_calls_are_stored_compactly(shape: str) -> None:
    found = call_store.measure(list(call_store.SHAPES[shape](10)))
    assert found["bytes_per_prompt_token"] <= 6
    assert found["bytes_per_sampled_token"] <= 12
    assert found["metadata_bytes_per_call"] <= 300
