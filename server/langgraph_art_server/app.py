"""Wiring only: makes the rooms of the server, connects them and mounts the routes."""

from __future__ import annotations

import hmac
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from langgraph_art.protocol import CreatePolicy
from langgraph_art_server.api import info, jobs, openai, policies, runs
from langgraph_art_server.config import ServerSettings
from langgraph_art_server.device import resolve_device
from langgraph_art_server.errors import ApiError, BadRequest, Unauthorized, body_of
from langgraph_art_server.models import find_model
from langgraph_art_server.serving.adapters import Adapters
from langgraph_art_server.serving.compute import ComputeLease
from langgraph_art_server.serving.engine import Engine, describe
from langgraph_art_server.serving.families import family_of
from langgraph_art_server.serving.gateway import Gateway
from langgraph_art_server.storage.calls import CallStore
from langgraph_art_server.storage.database import Database
from langgraph_art_server.storage.jobs import JobStore
from langgraph_art_server.storage.policies import PolicyStore
from langgraph_art_server.training.runner import Runner
from langgraph_art_server.training.trainer import Trainer

log = logging.getLogger(__name__)

VERSION = version("langgraph-art")


@dataclass
class Server:
    """The rooms that routes call."""

    settings: ServerSettings
    engine: Engine
    gateway: Gateway
    policies: PolicyStore
    calls: CallStore
    runner: Runner


def create_app(settings: ServerSettings) -> FastAPI:
    """The server as an ASGI application; its engine starts and stops with it.

    Raises:
        ModelNotFound: The base model cannot be had.
    """
    device = resolve_device(settings.device)
    model = find_model(settings.model)
    data_dir = settings.data_dir.expanduser().resolve()
    logs = data_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        database = Database(data_dir / "server.db")
        policy_store = PolicyStore(database, base_model=model.name, max_rank=settings.max_lora_rank)
        call_store, job_store = CallStore(database), JobStore(database)
        existing = policy_store.names()
        for name in settings.policies:
            if name not in existing:
                policy_store.create(CreatePolicy(name=name))
        engine = Engine(settings, model, family_of(model), device, logs / "engine.log")
        adapters = Adapters(engine, policy_store, data_dir)
        compute = ComputeLease(exclusive=device == "cpu")
        gateway = Gateway(engine, adapters, call_store, compute, settings.default_max_tokens)
        trainer = Trainer(settings, model, device, logs / "trainer.log")
        runner = Runner(
            data_dir=data_dir,
            jobs=job_store,
            policies=policy_store,
            calls=call_store,
            gateway=gateway,
            adapters=adapters,
            compute=compute,
            trainer=trainer,
        )
        app.state.server = Server(settings, engine, gateway, policy_store, call_store, runner)
        log.info("engine: %s", describe(engine))
        engine.start()
        runner.start()
        try:
            yield
        finally:
            await runner.stop()
            await engine.stop()
            database.close()

    key = [] if settings.api_key is None else [Depends(_require(settings.api_key.get_secret_value()))]
    app = FastAPI(title="langgraph-art", version=VERSION, lifespan=lifespan, dependencies=key)
    for routes in (info, policies, jobs, runs, openai):
        app.include_router(routes.router)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected_error)
    return app


def _require(api_key: str) -> Callable[[Request], None]:
    expected = f"Bearer {api_key}".encode()

    def check(request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        # Health is open: load balancers ask for it, and it tells nothing.
        if request.url.path != "/health" and not hmac.compare_digest(given, expected):
            raise Unauthorized("this server needs an API key: set LANGGRAPH_ART_API_KEY to the one it was started with")

    return check


def _answer(error: ApiError) -> JSONResponse:
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return JSONResponse({"error": body_of(error)}, status_code=error.status, headers=headers)


async def _api_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return _answer(error)


async def _validation_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    problems = "; ".join(f"{'.'.join(map(str, part['loc'][1:]))}: {part['msg']}" for part in error.errors())
    return _answer(BadRequest(problems, code="invalid_request"))


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    answer = ApiError(f"{request.method} {request.url.path}: {error.detail}", code="not_found")
    answer.status, answer.type = error.status_code, "invalid_request_error"
    return _answer(answer)


async def _unexpected_error(_request: Request, _error: Exception) -> JSONResponse:
    # Starlette raises it again after the answer, so the log has the details.
    return _answer(ApiError("the server failed on this request; its log has the details", code="internal_error"))
