"""The trainer as the rest of the server sees it: hand over a task, get its result.

Invariant: the worker process holds nothing that cannot be made again, so it may die at any moment; the task in hand
then raises :class:`WorkerDied` and the next one starts a new process. A remote or many-process trainer can take this
one's place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from langgraph_art_server.config import ServerSettings
from langgraph_art_server.device import Device, split_gpus
from langgraph_art_server.models import BaseModel
from langgraph_art_server.storage.jobs import PackingPlan
from langgraph_art_server.training.task import BackOff, Failed, Progress, Ready, SftTask, Trained, TrainTask

log = logging.getLogger(__name__)

# A result holds numbers only; this leaves room for very many policies.
_LINE_LIMIT = 64 * 1024 * 1024


_MESSAGE: TypeAdapter[Ready | Progress | Trained | BackOff | Failed] = TypeAdapter(
    Annotated[Ready | Progress | Trained | BackOff | Failed, Field(discriminator="kind")]
)


class WorkerDied(Exception):
    """The worker process ended without an answer; the message holds its last log lines."""


class WorkerKilled(WorkerDied):
    """A SIGKILL ended the worker: of the kernel, for want of memory, or of an operator."""


class TaskFailed(Exception):
    """The worker refused or could not do the task; trying again would fail again."""


class OutOfMemory(Exception):
    """The task did not fit into memory; nothing was trained.

    Args:
        plan: With which it may fit.
    """

    def __init__(self, plan: PackingPlan) -> None:
        super().__init__(plan)
        self.plan = plan


class Trainer:
    """A worker process on this machine, started when it is first needed."""

    def __init__(self, settings: ServerSettings, model: BaseModel, device: Device, log_path: Path) -> None:
        self._settings = settings
        self._model = model
        self._device = device
        self._log_path = log_path
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._plan: PackingPlan | None = None

    async def start(self) -> None:
        """Start the worker and wait until it has loaded the base model; nothing happens if it runs.

        Raises:
            WorkerDied: It ended while it started.
        """
        async with self._starting:
            if self._process is not None and self._process.returncode is None:
                return
            with self._log_path.open("wb") as output:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command(),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=output,
                    env=self._environment(),
                    limit=_LINE_LIMIT,
                    # A Ctrl-C in the terminal is for the server, which then ends the worker in its own order.
                    start_new_session=True,
                )
            ready = await self._receive(self._process)
            if not isinstance(ready, Ready):
                raise WorkerDied(f"the trainer worker did not start: {ready}")
            self._plan = PackingPlan(ready.token_budget, ready.checkpointing)
            if self._settings.quantized_apart:
                log.warning(
                    "engine and trainer round the base model differently, so their logprobs disagree: jobs that name "
                    "no correction get token_truncation"
                )
            log.info("trainer ready on %s, base model of %.0fM parameters", ready.device, ready.parameters / 1e6)

    @property
    def gives_way(self) -> bool:
        """Whether the engine, awake, needs the memory that the worker computes in: it then lives for one task."""
        return self._settings.gpu_sharing == "sleep"

    async def plan(self) -> PackingPlan:
        """What fits into the memory that the worker found free.

        Raises:
            WorkerDied: It ended while it started.
        """
        await self.start()
        assert self._plan is not None
        return self._plan

    async def train(self, task: TrainTask | SftTask, on_progress: Callable[[int, int], None]) -> Trained:
        """Do one task.

        Args:
            task: What to train.
            on_progress: Called with (packs done, packs in all).

        Raises:
            WorkerDied: The process ended before it answered; WorkerKilled, by a SIGKILL.
            TaskFailed: It said why it could not do it.
            OutOfMemory: It may fit with another packing plan.
            OSError: It could not do it now; a full disk, for example.
        """
        await self.start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(self._corrected(task).model_dump_json().encode() + b"\n")
            await process.stdin.drain()
            while True:
                message = await self._receive(process)
                match message:
                    case Progress():
                        on_progress(message.done, message.total)
                    case Trained():
                        return message
                    case BackOff():
                        raise OutOfMemory(PackingPlan(message.token_budget, message.checkpointing))
                    case Failed():
                        log.error("task %s failed\n%s", task.task_id, message.traceback)
                        raise OSError(message.error) if message.retry else TaskFailed(message.error)
                    case Ready():
                        raise WorkerDied("the trainer worker restarted by itself")
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._death(process) from error
        except asyncio.CancelledError:
            # Half-done work is of no use, and its answer would be taken for the next task's.
            await self.stop()
            raise

    def _corrected(self, task: TrainTask | SftTask) -> TrainTask | SftTask:
        if isinstance(task, SftTask) or task.config.correction is not None or not self._settings.quantized_apart:
            return task
        return task.model_copy(update={"config": task.config.model_copy(update={"correction": "token_truncation"})})

    async def stop(self) -> None:
        """End the worker at once; what it has not handed over is lost, by design."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _receive(self, process: asyncio.subprocess.Process) -> Ready | Progress | Trained | BackOff | Failed:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line.endswith(b"\n"):
            await process.wait()
            raise self._death(process)
        return _MESSAGE.validate_json(line)

    def _death(self, process: asyncio.subprocess.Process) -> WorkerDied:
        tail = self._log_path.read_bytes()[-2000:].decode(errors="replace").splitlines()[-10:]
        killed = process.returncode == -signal.SIGKILL
        # SIGKILL is how the kernel ends a process when memory runs out.
        hint = ", most likely for want of memory: take a smaller --token-budget or --model" * killed
        kind = WorkerKilled if killed else WorkerDied
        return kind(
            f"the trainer worker ended (exit code {process.returncode}{hint}). Its last log lines:\n" + "\n".join(tail)
        )

    def _command(self) -> list[str]:
        command = [sys.executable, "-m", "langgraph_art_server.training.worker"]
        command += ["--model", str(self._model.directory), "--device", self._device]
        if self._settings.token_budget is not None:
            command += ["--token-budget", str(self._settings.token_budget)]
        if self._settings.trainer_quantization is not None:
            command += ["--quantization", self._settings.trainer_quantization]
        return command

    def _environment(self) -> dict[str, str]:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if self._device == "cpu":
            # Threads that wait for work must leave the cores to the engine.
            environment |= {"KMP_BLOCKTIME": "0", "OMP_WAIT_POLICY": "passive"}
        elif self._settings.train_gpu is not None:
            visible = split_gpus(self._settings.train_gpu, os.environ.get("CUDA_VISIBLE_DEVICES"))
            environment["CUDA_VISIBLE_DEVICES"] = visible[1]
        return environment
