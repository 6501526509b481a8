"""The rooms of a server around a stub engine: everything is real but vLLM.

Invariant: requests go over real HTTP through the application that users start; only its lifespan, which would start
vLLM, is replaced by what is said here.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpx

from langgraph_art.protocol import CreatePolicy, LoraConfig, Submission, TrainResult
from langgraph_art_server.app import Server, connect, create_app
from langgraph_art_server.config import ServerSettings, TeacherAddress
from langgraph_art_server.models import BaseModel
from langgraph_art_server.serving.engine import Engine
from langgraph_art_server.storage.database import Database
from langgraph_art_server.storage.jobs import NewVersion
from langgraph_art_server.training.teacher import Teacher
from langgraph_art_server.training.trainer import Trainer

from .stub_engine import StubEngine, serving

LORA = LoraConfig(rank=3, alpha=6, seed=5)


class AttachedEngine(Engine):
    """The real engine object, attached to a stub that runs already instead of a vLLM process of its own."""

    def __init__(self, stub: StubEngine, model: BaseModel) -> None:
        super().__init__(model, "cpu", stub.max_model_len)
        self._stub = stub
        self._http = httpx.AsyncClient(verify=False, base_url=stub.url, timeout=None, trust_env=False)
        self._become("ready")

    def start(self) -> None:
        """It runs already."""

    async def stop(self) -> None:
        """It goes on."""
        await self._disconnect()
        self._become("stopped")

    def crash(self) -> None:
        """What the supervision does when the process ends; the next one has nothing loaded."""
        self._stub.adapters.clear()
        self._become("starting")

    async def come_back(self) -> None:
        """What it does when the next process answers."""
        await self.on_ready()
        self._become("ready")


@dataclass
class Rooms(Server):
    """One server's rooms; the runner is not started."""

    engine: AttachedEngine
    data_dir: Path
    stub: StubEngine

    def add_version(self, policy: str) -> int:
        """Commit a next version of a policy, whose directory only the stub could load; the plain name moves to it."""
        version = self.policies.head(policy).latest + 1
        directory = f"checkpoints/{policy}/{version}-made"
        (self.data_dir / directory).mkdir(parents=True)
        (self.data_dir / directory / "adapter_config.json").write_text("{}")
        job = self.jobs.add(Submission.model_validate(_EMPTY | {"idempotency_key": f"{policy}@{version}"}))
        result = TrainResult(updates=[], skipped={}, seconds={})
        self.jobs.commit(job.id, result, [NewVersion(policy, version, version - 1, directory, [f"{job.id}"])])
        self.jobs.finish(job.id, result)
        self.policies.mark_serving(policy, version)
        return version

    @asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        """The application over HTTP; yields its address."""
        settings = ServerSettings(model=str(self.engine.model.directory), data_dir=self.data_dir, device="cpu")
        app = create_app(settings)
        app.state.server = self
        async with serving(app) as url:
            yield url


@cache
def _empty_database() -> Path:
    """A database with all migrations applied, made once: they take longer than most tests."""
    path = Path(tempfile.mkdtemp(prefix="langgraph-art-tests-")) / "server.db"
    Database(path).close()
    return path


_EMPTY = {"groups": [{"group_id": "made", "runs": []}]}


@asynccontextmanager
async def open_rooms(
    data_dir: Path,
    stub: StubEngine,
    model_dir: Path | None = None,
    trainer: Trainer | None = None,
    teachers: Sequence[TeacherAddress] = (),
) -> AsyncIterator[Rooms]:
    """Rooms in ``data_dir``, with the policies ``desk`` and ``clerk``.

    Args:
        data_dir: Where database and checkpoints are, perhaps those of rooms that were closed.
        stub: A running stub.
        model_dir: Base model for the trainer; by default a directory that nothing can be trained with.
        trainer: In place of one of its own.
        teachers: For distillation; they are asked again for half a second only.
    """
    if model_dir is None:
        model_dir = data_dir / "no-model"
        model_dir.mkdir(parents=True, exist_ok=True)
        (model_dir / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 64}))
    model = BaseModel(stub.name, model_dir, json.loads((model_dir / "config.json").read_text()))
    if not (data_dir / "server.db").exists():
        shutil.copy(_empty_database(), data_dir / "server.db")
    database = Database(data_dir / "server.db")
    settings = ServerSettings(token_budget=64)
    engine = AttachedEngine(stub, model)
    trainer = trainer or Trainer(settings, model, "cpu", data_dir / "trainer.log")
    known = {teacher.name: Teacher(teacher, None, engine, patience=0.5) for teacher in teachers}
    server = connect(settings, data_dir, database, engine, trainer, known)
    for name in ("desk", "clerk"):
        server.policies.create(CreatePolicy(name=name, lora=LORA))
    try:
        yield Rooms(**vars(server), data_dir=data_dir, stub=stub)
    finally:
        for teacher in known.values():
            await teacher.close()
        await engine.stop()
        database.close()


async def eventually(condition: Callable[[], object], seconds: float = 10) -> None:
    """Wait, with a bound, until ``condition()`` is true."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
