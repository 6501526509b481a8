"""A small real HTTP server that speaks the langgraph-art API, for failures that a good server does not show.

Invariant: it accepts and answers only what `langgraph_art.protocol` allows. Its chat part is the client tests' stub. It
trains nothing: a finished job raises the version of each policy that it knows.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from langgraph_art.protocol import (
    PROTOCOL_VERSION,
    CreatePolicy,
    DeletedRun,
    Job,
    Policy,
    PolicyUpdate,
    PolicyVersion,
    ServerInfo,
    SftSubmission,
    Submission,
    TrainResult,
)

from ..client import openai_stub
from ..server.stub_engine import QuickServer

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class StubServer:
    """The server, its memory, and switches for what shall go wrong."""

    chat: openai_stub.OpenAIStub = field(default_factory=openai_stub.OpenAIStub)
    policies: dict[str, Policy] = field(default_factory=dict)
    submissions: dict[str, Submission | SftSubmission] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    """Method and path of each API request."""

    protocol: int = PROTOCOL_VERSION
    engine: str = "ready"
    api_key: str | None = None
    packs: int = 3
    """Packs of each job; one is computed with each event."""
    busy: int = 0
    """So many API requests are answered with 503."""
    retry_after: str = "0"
    drop_streams: int = 0
    """So many event streams break off after one event."""
    end_streams: int = 0
    """So many event streams end, in order, after one event."""
    fail: str | None = None
    """Reason for which the next jobs fail."""
    untrainable: dict[str, int] | None = None
    """What the next jobs skip, with nothing left to train."""
    warnings: list[str] = field(default_factory=list)
    """What the next jobs warn of."""
    not_serving: str | None = None
    """Reason for which the next jobs stay trained."""
    in_use: set[str] = field(default_factory=set)
    """Runs that cannot be deleted."""
    silent: bool = False
    """Whether event streams of jobs that stay trained hold comments only."""

    def start(self, port: int = 0) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(_app(self), log_level="critical", timeout_graceful_shutdown=1)
        self._server = QuickServer(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 10
        while not self._server.started:
            assert time.monotonic() < deadline, "the stub did not start"
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        self._server.force_exit = True  # not waiting for clients that keep their connections
        self._thread.join(timeout=10)

    def advance(self, job: Job) -> None:
        """Compute one pack, or report again on a job that cannot be served."""
        if job.state == "trained":
            job.error = self.not_serving
            job.state = "trained" if self.not_serving else "finished"
            return
        job.state, job.total, job.done = "running", self.packs, job.done + 1
        if job.done < self.packs:
            return
        if self.fail is not None:
            job.state, job.error = "failed", self.fail
            return
        if self.untrainable is not None:
            job.state, job.result = (
                "finished",
                TrainResult(updates=[], skipped=self.untrainable, warnings=self.warnings, seconds={}),
            )
            return
        for policy in self.policies.values():
            policy.version += 1
        updates = [
            PolicyUpdate(
                policy=policy.name,
                parent=policy.version - 1,
                version=policy.version,
                runs=1,
                calls=1,
                trained_tokens=1,
                computed_tokens=1,
                metrics={"loss": 0.5},
                losses=[1.5, 0.5] if job.kind == "sft" else [],
            )
            for policy in self.policies.values()
        ]
        job.state, job.error = ("trained", self.not_serving) if self.not_serving else ("finished", None)
        job.result = TrainResult(
            updates=updates,
            skipped={"group:no_signal": 1},
            warnings=self.warnings,
            seconds={"queue": 0.1, "train": 0.2},
        )


def _app(stub: StubServer) -> FastAPI:
    app = openai_stub._app(stub.chat)

    @app.middleware("http")
    async def gate(request: Request, call_next: object) -> Response:
        if not request.url.path.startswith("/api"):
            return await call_next(request)
        stub.requests.append(f"{request.method} {request.url.path}")
        if stub.busy > 0:
            stub.busy -= 1
            answer = _error(503, "the engine is restarting", "unavailable")
            answer.headers["retry-after"] = stub.retry_after
            return answer
        if stub.api_key is not None and request.headers.get("authorization") != f"Bearer {stub.api_key}":
            return _error(401, "the API key is missing or wrong", "invalid_api_key")
        return await call_next(request)

    @app.get("/api/info")
    async def info() -> Response:
        return _json(
            ServerInfo(
                version="0",
                protocol=stub.protocol,
                base_model="base",
                max_model_len=2048,
                device="cpu",
                engine=stub.engine,
                engine_error="out of memory" if stub.engine == "failed" else None,
                policies=list(stub.policies),
            )
        )

    @app.get("/api/policies")
    async def list_policies() -> list[Policy]:
        return list(stub.policies.values())

    @app.get("/api/policies/{name}")
    async def get_policy(name: str) -> Response:
        known = stub.policies.get(name)
        return _json(known) if known else _error(404, f"no policy {name}; there are {list(stub.policies)}", "not_found")

    @app.post("/api/policies")
    async def create_policy(body: CreatePolicy) -> Response:
        version = PolicyVersion(version=0, parent=None, job_id=None, created_at=NOW, serving=True)
        policy = Policy(name=body.name, lora=body.lora, version=0, versions=[version])
        if stub.policies.setdefault(body.name, policy).lora != body.lora:
            return _error(409, f"{body.name} exists with another shape", "conflict")
        return _json(stub.policies[body.name])

    @app.post("/api/submissions")
    async def submit(body: Submission) -> Response:
        return accept(body, "train")

    @app.post("/api/sft")
    async def sft(body: SftSubmission) -> Response:
        return accept(body, "sft")

    def accept(body: Submission | SftSubmission, kind: Literal["train", "sft"]) -> Response:
        known = stub.submissions.setdefault(body.idempotency_key, body)
        if known != body:
            return _error(409, "this idempotency key was used for another submission", "conflict")
        number, key = len(stub.jobs), body.idempotency_key
        job = Job(id=f"job-{number}", kind=kind, idempotency_key=key, state="queued", created_at=NOW)
        same = [job for job in stub.jobs.values() if job.idempotency_key == body.idempotency_key]
        job = same[0] if same else stub.jobs.setdefault(job.id, job)
        return _json(job, 202)

    @app.get("/api/jobs/{job_id}")
    async def get_job(job_id: str) -> Response:
        return _json(stub.jobs[job_id]) if job_id in stub.jobs else _error(404, f"no job {job_id}", "not_found")

    @app.get("/api/jobs/{job_id}/events")
    async def events(job_id: str) -> Response:
        return StreamingResponse(_events(stub, stub.jobs[job_id]), media_type="text/event-stream")

    @app.get("/api/runs/{run_id}/calls")
    async def calls(run_id: str) -> list[object]:
        return []

    @app.delete("/api/runs/{run_id}")
    async def delete_run(run_id: str) -> Response:
        if run_id in stub.in_use:
            return _error(409, f"run {run_id} is in job j1, which is queued: wait for the job", "run_in_use")
        trained = sorted(f"{policy.name}@{policy.version}" for policy in stub.policies.values())
        return _json(DeletedRun(run_id=run_id, calls=3, pins=1, jobs=0, trained_into=trained))

    return app


async def _events(stub: StubServer, job: Job) -> AsyncIterator[str]:
    yield ": a comment, to keep the connection open\n\n"
    while job.state not in ("finished", "failed"):
        stub.advance(job)
        yield f"event: job\ndata: {job.model_dump_json()}\n\n"
        while job.state == "trained":
            await asyncio.sleep(0.05)
            yield ": still there\n\n"
            if not stub.silent:
                break
        if stub.drop_streams > 0:
            stub.drop_streams -= 1
            raise ConnectionError("the stub breaks the stream off")
        if stub.end_streams > 0:
            stub.end_streams -= 1
            return


def _json(message: object, status: int = 200) -> JSONResponse:
    return JSONResponse(json.loads(message.model_dump_json()), status_code=status)


def _error(status: int, message: str, code: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "error", "code": code, "param": None}}, status)
