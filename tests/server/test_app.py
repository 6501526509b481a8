"""The application without its engine: keys, error form, models that cannot be had."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from pydantic import SecretStr

from langgraph_art_server.app import create_app
from langgraph_art_server.config import ServerSettings
from langgraph_art_server.main import CannotServe, serve
from langgraph_art_server.models import ModelNotFound, find_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 64}))
    return directory


def client(app: FastAPI) -> httpx.AsyncClient:
    # No lifespan: no engine is started.
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server")


async def test_every_route_but_health_wants_the_key(model: Path, tmp_path: Path) -> None:
    settings = ServerSettings(model=str(model), data_dir=tmp_path, device="cpu", api_key=SecretStr("s3cret"))
    app = create_app(settings)
    checked = 0
    async with client(app) as http:
        for path, methods in sorted(_routes(app)):
            if path == "/health":
                continue
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
                answer = await http.request(methods[0], path, headers=headers)
                assert answer.status_code == 401, path
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert "s3cret" not in answer.text
                checked += 1
    assert checked >= 3 * 8
    assert "s3cret" not in repr(settings)


def _routes(app: FastAPI) -> set[tuple[str, tuple[str, ...]]]:
    return {(path, tuple(method.upper() for method in item)) for path, item in app.openapi()["paths"].items()}


async def test_an_unknown_route_answers_in_openais_form(model: Path, tmp_path: Path) -> None:
    async with client(create_app(ServerSettings(model=str(model), data_dir=tmp_path, device="cpu"))) as http:
        answer = await http.get("/v1/embeddings")
    assert answer.status_code == 404
    assert set(answer.json()["error"]) == {"message", "type", "code", "param"}


async def test_an_unexpected_error_answers_in_openais_form_and_tells_nothing(model: Path, tmp_path: Path) -> None:
    app = create_app(ServerSettings(model=str(model), data_dir=tmp_path, device="cpu"))

    @app.get("/broken")
    def broken() -> None:
        raise RuntimeError("a secret detail")

    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        answer = await http.get("/broken")
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text


def test_a_model_is_found_by_its_directory(model: Path) -> None:
    found = find_model(str(model))
    assert (found.name, found.directory, found.context_length) == ("model", model, 64)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_directory_that_is_no_model_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        find_model(str(tmp_path))


def test_a_misspelt_name_of_the_bundled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **options: object) -> None:
        raise OSError("no such repository")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ModelNotFound, match=r"no such repository\); did you mean smollm2-135m-instruct\?"):
        find_model("SmolLM2-135M-instuct")
    with pytest.raises(ModelNotFound, match=r"no such repository\)$"):
        find_model("Qwen/Qwen3-0.6B")


def test_a_longer_context_than_the_models_is_refused_before_the_engine_starts(model: Path, tmp_path: Path) -> None:
    settings = ServerSettings(model=str(model), data_dir=tmp_path, device="cpu", max_model_len=65)
    with pytest.raises(ValueError, match="--max-model-len 65 is too large: the model's config allows 64 tokens"):
        create_app(settings)
    config = {"model_type": "llama", "max_position_embeddings": 64, "rope_scaling": {"rope_type": "yarn", "factor": 2}}
    (model / "config.json").write_text(json.dumps(config))
    create_app(settings)


def test_a_taken_port_costs_no_engine_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotServe, match=rf"127\.0\.0\.1:{port}.*--port"):
            serve(ServerSettings(model="never looked at", data_dir=tmp_path, port=port))


@pytest.mark.parametrize("argument", ["--host=0.0.0.0", "--logprobs-mode", "--served_model_name", "--api-key"])
def test_engine_arguments_that_would_break_a_promise_are_refused(argument: str) -> None:
    with pytest.raises(ValueError, match="the server sets this itself"):
        ServerSettings(engine_args=["--seed", "1", argument])
