"""Wiring only: makes the rooms of the server, connects them and mounts the routes."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from langgraph_art.protocol import CreatePolicy
from langgraph_art_server.api import info, jobs, openai, policies, runs, sft
from langgraph_art_server.config import ServerSettings, TeacherAddress
from langgraph_art_server.device import Device, resolve_device
from langgraph_art_server.errors import ApiError, BadRequest, Unauthorized, body_of
from langgraph_art_server.lora_targets import served_linears
from langgraph_art_server.models import BaseModel, ModelNotFound, find_model
from langgraph_art_server.serving.adapters import Adapters
from langgraph_art_server.serving.compute import ComputeLease
from langgraph_art_server.serving.engine import Engine
from langgraph_art_server.serving.external import ExternalEngine
from langgraph_art_server.serving.families import family_of
from langgraph_art_server.serving.gateway import Gateway
from langgraph_art_server.serving.managed import ManagedEngine
from langgraph_art_server.serving.vllm_command import VllmCommand
from langgraph_art_server.storage.calls import CallStore
from langgraph_art_server.storage.database import Database
from langgraph_art_server.storage.jobs import JobStore
from langgraph_art_server.storage.policies import PolicyStore
from langgraph_art_server.storage.retention import expire_unclaimed
from langgraph_art_server.training.examples import ChatTokenizer
from langgraph_art_server.training.runner import Runner
from langgraph_art_server.training.support import unsupported
from langgraph_art_server.training.teacher import Teacher
from langgraph_art_server.training.trainer import Trainer

log = logging.getLogger(__name__)

VERSION = version("langgraph-art")


@dataclass
class Server:
    """The rooms of a server, as routes call them."""

    settings: ServerSettings
    engine: Engine
    trainer: Trainer
    adapters: Adapters
    compute: ComputeLease
    gateway: Gateway
    policies: PolicyStore
    calls: CallStore
    jobs: JobStore
    runner: Runner


def connect(
    settings: ServerSettings,
    data_dir: Path,
    database: Database,
    engine: Engine,
    trainer: Trainer,
    teachers: Mapping[str, Teacher],
) -> Server:
    """Makes the rooms of a server around its engine and its trainer; nothing is started."""
    policies = PolicyStore(
        database,
        base_model=engine.model.name,
        max_rank=settings.max_lora_rank,
        linears=served_linears(engine.model.directory),
    )
    calls, jobs = CallStore(database), JobStore(database)
    adapters = Adapters(engine, policies, data_dir)
    shared = settings.engine_url is None and (engine.device == "cpu" or settings.gpu_sharing == "sleep")
    compute = ComputeLease(exclusive=shared, aside=engine.aside)
    engine.busy = compute.in_use
    gateway = Gateway(engine, adapters, calls, compute, settings.default_max_tokens)
    runner = Runner(
        data_dir=data_dir,
        jobs=jobs,
        policies=policies,
        calls=calls,
        gateway=gateway,
        adapters=adapters,
        compute=compute,
        trainer=trainer,
        chat_tokenizer=ChatTokenizer(engine),
        teachers=teachers,
    )
    return Server(settings, engine, trainer, adapters, compute, gateway, policies, calls, jobs, runner)


def create_app(settings: ServerSettings) -> FastAPI:
    """The server as an ASGI application; its engine starts and stops with it.

    Raises:
        ModelNotFound: The base model cannot be had, or cannot be trained exactly.
        ValueError: An option has no effect on the device, or asks for a longer context than the model has.
    """
    device = resolve_device(settings.device)
    settings.check_device(device)
    model = find_model(settings.model)
    if problem := unsupported(model.config):
        raise ModelNotFound(f"--model {settings.model!r}: {problem}; take another model")
    settings.check_context(model.context_length, stretched=model.stretched)
    data_dir = settings.data_dir.expanduser().resolve()
    logs = data_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        database = Database(data_dir / "server.db")
        engine = _engine(settings, model, device, logs / "engine.log")
        addresses = [TeacherAddress.parse(text) for text in settings.teachers]
        teachers = {
            address.name: Teacher(address, settings.teacher_api_keys.get(address.name), engine) for address in addresses
        }
        trainer = Trainer(settings, model, device, logs / "trainer.log")
        server = app.state.server = connect(settings, data_dir, database, engine, trainer, teachers)
        existing = server.policies.names()
        for name in settings.policies:
            if name not in existing:
                server.policies.create(CreatePolicy(name=name))
        engine.start()
        server.runner.start()
        expiry = asyncio.create_task(expire_unclaimed(server.calls, timedelta(hours=settings.keep_unclaimed_hours)))
        try:
            yield
        finally:
            expiry.cancel()
            await server.runner.stop()
            for teacher in teachers.values():
                await teacher.close()
            await engine.stop()
            database.close()

    key = [] if settings.api_key is None else [Depends(_require(settings.api_key.get_secret_value()))]
    app = FastAPI(title="langgraph-art", version=VERSION, lifespan=lifespan, dependencies=key)
    for routes in (info, policies, jobs, sft, runs, openai):
        app.include_router(routes.router)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected_error)
    return app


def _engine(settings: ServerSettings, model: BaseModel, device: Device, log_path: Path) -> Engine:
    if settings.engine_url is not None:
        return ExternalEngine(settings, model, device)
    command = VllmCommand(settings, model, family_of(model), device)
    log.info("engine: %s", command.describe())
    return ManagedEngine(command, settings, model, device, log_path)


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
