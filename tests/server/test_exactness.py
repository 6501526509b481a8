"""What the gateway records is what the engine sampled, in every mode of answering, or the call says why it is not."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, AIMessageChunk

from langgraph_art import ChatART, record
from langgraph_art.protocol import RecordedCall
from langgraph_art_server.config import ServerSettings
from langgraph_art_server.models import BaseModel
from langgraph_art_server.serving.adapters import Target
from langgraph_art_server.serving.capture import CallHeader, Capture
from langgraph_art_server.serving.families import Family
from langgraph_art_server.serving.managed import ManagedEngine
from langgraph_art_server.serving.vllm_command import VllmCommand

from .rooms import Rooms
from .stub_engine import PIECE, Answer, StubEngine, logprob, prompt_ids

# Every case starts a server.
pytestmark = pytest.mark.slow

IDS = (21, 22, 23, 24, 25, 26, 27, 28)
ASKED = [{"content": "where is my order"}]


@pytest.fixture
async def url(rooms: Rooms) -> AsyncIterator[str]:
    async with rooms.served() as address:
        yield f"{address}/v1"


def look(topic: str) -> str:
    """Look a topic up."""
    return topic


MODES = ("invoke", "ainvoke", "stream", "astream")


async def ask(url: str, mode: str, tools: bool = False, **options: Any) -> tuple[AIMessage, str]:
    """One call of the policy ``desk`` in a way of calling it; the answer, and the id of the run."""
    model = ChatART(model="desk", base_url=url, max_retries=0, **options)
    llm: Any = model.bind_tools([look]) if tools else model
    answer: Any = AIMessageChunk("")
    with record() as run:
        if mode == "invoke":
            answer = await asyncio.to_thread(llm.invoke, "where is my order")
        elif mode == "ainvoke":
            answer = await llm.ainvoke("where is my order")
        elif mode == "stream":
            for chunk in await asyncio.to_thread(lambda: list(llm.stream("where is my order"))):
                answer += chunk
        else:
            async for chunk in llm.astream("where is my order"):
                answer += chunk
    assert run.calls[0].delivered
    return answer, run.run_id


def exact(rooms: Rooms, run_id: str, ids: tuple[int, ...] = IDS) -> RecordedCall:
    (call,) = rooms.calls.of_run(run_id)
    assert call.prompt_ids == prompt_ids(ASKED)
    assert call.sampled_ids == list(ids)
    assert call.logprobs == [logprob(token) for token in ids]
    assert call.status == "complete"
    return call


async def test_several_tool_calls_in_one_message(rooms: Rooms, url: str) -> None:
    calls = [("look", json.dumps({"topic": topic})) for topic in ("rivers", "lakes", "seas")]
    for mode in MODES:
        rooms.stub.next(Answer(ids=IDS, tool_calls=calls))
        answer, run_id = await ask(url, mode, tools=True)
        assert [call["args"]["topic"] for call in answer.tool_calls] == ["rivers", "lakes", "seas"], mode
        call = exact(rooms, run_id)
        assert (call.finish_reason, call.untrainable) == ("tool_calls", None)


async def test_a_tool_call_that_was_cut(rooms: Rooms, url: str) -> None:
    for mode in MODES:
        rooms.stub.next(Answer(ids=IDS, tool_calls=[("look", '{"topic": "riv')]))
        answer, run_id = await ask(url, mode, tools=True, max_tokens=5)
        assert len(answer.invalid_tool_calls) + len(answer.tool_calls) == 1, mode
        call = exact(rooms, run_id, IDS[:5])
        assert (call.finish_reason, call.untrainable) == ("length", None)


async def test_thoughts_of_a_reasoning_model(rooms: Rooms, url: str) -> None:
    """Also if the caller does not want to see them, in which case vLLM would give no ids."""
    for mode, shown in itertools.product(MODES, (True, False)):
        rooms.stub.next(Answer(ids=IDS, reasoning=3))
        answer, run_id = await ask(url, mode, extra_body={"include_reasoning": shown})
        assert answer.content == PIECE * 5, mode
        assert answer.additional_kwargs.get("reasoning_content") == (PIECE * 3 if shown else None), mode
        assert exact(rooms, run_id).untrainable is None


async def test_structured_output(rooms: Rooms, url: str) -> None:
    schema = {"name": "verdict", "schema": {"type": "object", "properties": {"good": {"type": "boolean"}}}}
    asked = {"response_format": {"type": "json_schema", "json_schema": schema}}
    for mode in MODES:
        rooms.stub.next(Answer(ids=(21,), piece='{"good": true}'))
        answer, run_id = await ask(url, mode, model_kwargs=asked)
        assert json.loads(str(answer.content)) == {"good": True}, mode
        assert exact(rooms, run_id, (21,)).untrainable == "constrained"


async def test_a_stop_string_a_cut_and_an_empty_answer(rooms: Rooms, url: str) -> None:
    for mode in MODES:
        rooms.stub.next(Answer(ids=IDS))
        _, run_id = await ask(url, mode, stop=["\n"])
        assert exact(rooms, run_id).sampling["stop"] == ["\n"]
        rooms.stub.next(Answer(ids=IDS))
        answer, run_id = await ask(url, mode, max_tokens=3)
        assert answer.content == PIECE * 3, mode
        assert exact(rooms, run_id, IDS[:3]).finish_reason == "length"
        # Only the end token: no text, but a decision of the policy like any other.
        rooms.stub.next(Answer(ids=(2,), piece=""))
        answer, run_id = await ask(url, mode)
        assert answer.content == "", mode
        assert exact(rooms, run_id, (2,)).untrainable is None


@pytest.mark.parametrize("loses", ["id", "logprob", "usage", "prompt"])
async def test_an_engine_that_forgets_something(rooms: Rooms, url: str, loses: Any) -> None:
    """The graph gets its answer; the call is kept and does not train."""
    for mode in MODES:
        rooms.stub.next(Answer(ids=IDS, loses=loses))
        answer, run_id = await ask(url, mode)
        assert answer.content == PIECE * 8, mode
        (call,) = rooms.calls.of_run(run_id)
        assert (call.status, call.untrainable) == ("complete", "ids_disagree")


@pytest.mark.parametrize(
    ("engine_args", "parser", "strict"),
    [
        ([], None, False),
        ([], "hermes", False),
        ([], "glm45", True),
        (["--tool-strict-level", "parameter"], "hermes", True),
        (["--seed=1", "--tool-strict-level=function"], "hermes", True),
        (["--tool-strict-level", "auto"], "hermes", False),
    ],
)
def test_the_engine_says_whether_it_holds_tool_calls_to_a_grammar(
    tmp_path: Path, engine_args: list[str], parser: str | None, strict: bool
) -> None:
    settings = ServerSettings(engine_args=engine_args)
    model = BaseModel("tiny", tmp_path, {"max_position_embeddings": 64})
    command = VllmCommand(settings, model, Family(parser), "cpu")
    assert ManagedEngine(command, settings, model, "cpu", tmp_path / "log").strict_tools is strict


@given(
    tokens=st.integers(1, 12),
    reasoning=st.integers(0, 12),
    arguments=st.lists(st.text('ab{}: "', max_size=9), max_size=3),
    cuts=st.data(),
    choices=st.integers(1, 3),
)
def test_a_stream_cut_anywhere_is_recorded_like_the_whole_answer(
    tokens: int, reasoning: int, arguments: list[str], cuts: st.DataObject, choices: int
) -> None:
    """Tokens come in chunks of any size, of any choice in turn, with or without something for the client to see."""
    answer = Answer(
        ids=range(3, 3 + tokens), reasoning=min(reasoning, tokens), tool_calls=[("f", text) for text in arguments]
    )
    body = {"model": "desk", "messages": ASKED, "logprobs": True, "return_token_ids": True, "n": choices}
    engine = StubEngine()
    records = []
    for stream in (False, True):
        capture = Capture(CallHeader("c", 0, "r", None, None), {**body, "stream": stream}, Target("desk", 1))
        asked = capture.request("desk@1", 99)
        if stream:
            for events in _joined(engine._events(asked, prompt_ids(ASKED), answer), cuts):
                capture.take(events)
        else:
            capture.take(engine._whole(asked, prompt_ids(ASKED), answer))
        records.append([call.model_copy(update={"created_at": None}) for call in capture.records()])
    assert records[0] == records[1]
    assert [call.untrainable for call in records[0]] == [None] + ["unused_choice"] * (choices - 1)
    assert [call.sampled_ids for call in records[0]] == [list(answer.ids)] * choices


def _joined(events: list[dict[str, Any]], cuts: st.DataObject) -> list[dict[str, Any]]:
    """The events of a stream, with some that follow each other in one choice made one, as a busy engine does."""
    made: list[dict[str, Any]] = []
    for event in events:
        last = made[-1]["choices"] if made else []
        same = bool(last and event["choices"]) and last[0]["index"] == event["choices"][0]["index"]
        if same and "token_ids" in last[0] and cuts.draw(st.booleans()):
            new = event["choices"][0]
            last[0]["token_ids"] += new["token_ids"]
            last[0]["logprobs"]["content"] += new["logprobs"]["content"]
            last[0]["finish_reason"] = new["finish_reason"]
        else:
            made.append(event)
    return made
