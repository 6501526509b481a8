"""What a teacher is asked, what is made of its answers, and what happens when it is another model or away."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import SecretStr, ValidationError

from langgraph_art_server.config import ServerSettings, TeacherAddress
from langgraph_art_server.models import BaseModel
from langgraph_art_server.training.task import TaskCall
from langgraph_art_server.training.teacher import Teacher, TeacherFailed

from .rooms import AttachedEngine
from .stub_engine import StubEngine, serving, text_ids, text_of

# Every case starts two servers.
pytestmark = pytest.mark.slow

VOCABULARY = 100


@dataclass
class StubVllm:
    """The routes of vLLM that a teacher needs. Token 13 is impossible, and each token has a logprob of its own."""

    models: list[str] = field(default_factory=lambda: ["large"])
    max_model_len: int = 32
    shift: int = 0
    """Numbers tokens otherwise, by so much."""
    offset: float = 0.0
    key: str | None = None
    fail: int = 0
    """So many completions are answered with 503."""
    without_logprobs: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.middleware("http")
        async def gate(request: Request, call_next: Any) -> Any:
            self.paths.append(request.url.path)
            if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
                return JSONResponse({"error": {"message": "no"}}, status_code=401)
            return await call_next(request)

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"data": [{"id": name, "max_model_len": self.max_model_len} for name in self.models]}

        @app.post("/tokenize")
        async def tokenize(request: Request) -> dict[str, Any]:
            body = await request.json()
            assert body["add_special_tokens"] is False
            return {"tokens": [token + self.shift for token in text_ids(body["prompt"])]}

        @app.post("/detokenize")
        async def detokenize(request: Request) -> dict[str, Any]:
            return {"prompt": text_of([token - self.shift for token in (await request.json())["tokens"]])}

        @app.post("/v1/completions")
        async def completions(request: Request) -> Any:
            body = await request.json()
            self.asked.append(body)
            if self.fail > 0:
                self.fail -= 1
                return JSONResponse({"error": {"message": "busy"}}, status_code=503)
            ids = body["prompt"]
            assert len(ids) < self.max_model_len, "it has to sample a token, which the context must hold"
            logprobs = [None, *({str(token): {"logprob": self.logprob(token), "rank": 1}} for token in ids[1:])]
            return {"choices": [{"text": "x", "prompt_logprobs": None if self.without_logprobs else logprobs}]}

        return app

    def logprob(self, token: int) -> float:
        return -9999.0 if token == 13 else self.offset - token / 16


def call(prompt: list[int], sampled: list[int], temperature: float = 1.0) -> TaskCall:
    logprobs = [-1.0] * len(sampled)
    return TaskCall(
        call_id="c",
        node="n",
        prompt_ids=prompt,
        sampled_ids=sampled,
        logprobs=logprobs,
        temperature=temperature,
        version=0,
    )


@asynccontextmanager
async def teaching(
    stub: StubVllm, tmp_path: Path, *, key: str | None = None, model: str | None = None, patience: float = 0.5
) -> AsyncIterator[Teacher]:
    """A teacher at the stub, next to an engine that numbers tokens without a shift."""
    engine_stub = StubEngine(name="small")
    base = BaseModel("small", tmp_path, {"vocab_size": VOCABULARY})
    async with engine_stub.running(), serving(stub.app()) as url:
        engine = AttachedEngine(engine_stub, base)
        secret = None if key is None else SecretStr(key)
        teacher = Teacher(TeacherAddress("big", url, model), secret, engine, patience=patience)
        try:
            yield teacher
        finally:
            await teacher.close()
            await engine.stop()


async def test_it_is_asked_for_exactly_our_tokens(tmp_path: Path) -> None:
    stub = StubVllm()
    calls = [call([1, 2, 3], [4, 5]), call([7], [8, 13, 9])]
    skipped: Counter[str] = Counter()
    async with teaching(stub, tmp_path) as teacher:
        await teacher.score(calls, skipped)
        assert calls[0].teacher_logprobs == [-4 / 16, -5 / 16]
        given = calls[1].teacher_logprobs
        assert given is not None
        assert (given[0], given[2]) == (-8 / 16, -9 / 16)
        assert math.isnan(given[1])
        assert skipped == {"teacher:impossible_token": 1}
        assert sorted(body["prompt"] for body in stub.asked) == [[1, 2, 3, 4, 5], [7, 8, 13, 9]]
        assert all(
            (body["model"], body["max_tokens"], body["prompt_logprobs"]) == ("large", 1, 0) for body in stub.asked
        )
        probes = stub.paths.count("/tokenize") + stub.paths.count("/detokenize")
        await teacher.score([call([1], [2])], skipped)
        assert stub.paths.count("/tokenize") + stub.paths.count("/detokenize") == probes, "it is checked once"


async def test_calls_that_it_cannot_judge_stay_without_and_are_counted(tmp_path: Path) -> None:
    stub = StubVllm(max_model_len=8)
    fits, too_long, warm, empty = call([1] * 4, [2] * 3), call([1] * 4, [2] * 4), call([1], [2], 0.7), call([], [])
    skipped: Counter[str] = Counter()
    async with teaching(stub, tmp_path) as teacher:
        await teacher.score([fits, too_long, warm, empty], skipped)
    assert fits.teacher_logprobs == [-2 / 16] * 3
    assert [other.teacher_logprobs for other in (too_long, warm, empty)] == [None] * 3
    assert skipped == {"teacher:too_long": 1, "teacher:other_temperature": 1}


@pytest.mark.parametrize(
    ("stub", "model", "message"),
    [
        (StubVllm(shift=1), None, "another vocabulary than the base model small"),
        (StubVllm(models=["a", "b"]), None, r"serves a, b: say which with --teacher NAME=URL,model=MODEL"),
        (StubVllm(models=["a", "b"]), "c", "does not serve 'c'; it serves a, b"),
        (StubVllm(without_logprobs=True), None, "without the logprobs of our tokens"),
        (StubVllm(offset=20.0), None, "logits where logprobs belong"),
        (StubVllm(key="right"), None, "LANGGRAPH_ART_SERVER_TEACHER_API_KEYS"),
    ],
    ids=lambda value: "" if isinstance(value, StubVllm) else str(value)[:20],
)
async def test_a_teacher_that_is_no_use_is_refused_and_says_why(
    tmp_path: Path, stub: StubVllm, model: str | None, message: str
) -> None:
    async with teaching(stub, tmp_path, key="wrong", model=model) as teacher:
        with pytest.raises(TeacherFailed, match=rf"teacher 'big' at http://127\.0\.0\.1:\d+ .*{message}"):
            await teacher.score([call([1], [2])], Counter())


async def test_one_that_is_busy_is_asked_again(tmp_path: Path) -> None:
    calls = [call([1], [2])]
    async with teaching(StubVllm(fail=1), tmp_path, patience=10) as teacher:
        await teacher.score(calls, Counter())
    assert calls[0].teacher_logprobs == [-2 / 16]


async def test_one_that_is_away_fails_in_bounded_time(tmp_path: Path) -> None:
    async with teaching(StubVllm(fail=10**6), tmp_path) as teacher:
        with pytest.raises(TeacherFailed, match=r"teacher 'big' .*status 503.*busy"):
            await teacher.score([call([1], [2])] * 40, Counter())
    address = TeacherAddress.parse("big=http://127.0.0.1:9/v1,model=m")
    engine = AttachedEngine(StubEngine(), BaseModel("small", tmp_path, {"vocab_size": 9}))
    teacher = Teacher(address, None, engine, patience=0.2)
    with pytest.raises(TeacherFailed, match=r"'big' at http://127.0.0.1:9 does not answer.*submit again"):
        await teacher.score([call([1], [2])], Counter())
    await teacher.close()
    await engine.stop()


async def test_its_key_is_sent_and_never_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    calls = [call([1], [2])]
    async with teaching(StubVllm(key="s3cret"), tmp_path, key="s3cret") as teacher:
        await teacher.score(calls, Counter())
    assert calls[0].teacher_logprobs == [-2 / 16]
    assert "s3cret" not in caplog.text


def test_addresses() -> None:
    assert TeacherAddress.parse("big=http://box:8000/v1/") == TeacherAddress("big", "http://box:8000", None)
    assert TeacherAddress.parse("a=https://h,model=Q/W-32B") == TeacherAddress("a", "https://h", "Q/W-32B")
    for wrong in ("http://box:8000", "big=box:8000", "big=http://box,mode=x", "big=http://box,model=", "=http://box"):
        with pytest.raises(ValueError, match="NAME=URL"):
            TeacherAddress.parse(wrong)
    with pytest.raises(ValidationError, match="same name"):
        ServerSettings(teachers=["a=http://x", "a=http://y"])
    with pytest.raises(ValueError, match="a password in its URL") as caught:
        TeacherAddress.parse("big=http://me:pw@box:8000")
    assert "pw" not in str(caught.value)


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGGRAPH_ART_SERVER_TEACHER_API_KEYS", '{"big": "s3cret"}')
    settings = ServerSettings(teachers=["big=http://box:8000"])
    assert settings.teacher_api_keys["big"].get_secret_value() == "s3cret"
    assert "s3cret" not in repr(settings)
    with pytest.raises(ValidationError, match="no teacher is called small"):
        ServerSettings(teachers=["big=http://box"], teacher_api_keys={"small": SecretStr("x")})
