"""Works the queue: one job at a time, in order of acceptance, from submission to serving version.

Invariant: the database says what happened. A crash before the commit leaves the job queued and an orphan directory,
which the next start deletes; a crash after it leaves versions to load, and loading is all that is tried again.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from sqlalchemy.exc import OperationalError

from langgraph_art.protocol import ChatExample, Job, RecordedExample, SftSubmission, Submission, TrainResult
from langgraph_art_server.errors import NotFound, Unavailable
from langgraph_art_server.serving.adapters import Adapters
from langgraph_art_server.serving.compute import ComputeLease
from langgraph_art_server.serving.gateway import Gateway
from langgraph_art_server.storage.calls import CallStore
from langgraph_art_server.storage.jobs import JobStore, NewVersion, PackingPlan
from langgraph_art_server.storage.policies import Head, PolicyStore
from langgraph_art_server.training.back_off import smaller_plan
from langgraph_art_server.training.examples import ChatTokenizer, recorded_answers
from langgraph_art_server.training.join import join
from langgraph_art_server.training.task import Lineage, PolicyTask, SftTask, Trained, TrainTask
from langgraph_art_server.training.teacher import Teacher, TeacherFailed
from langgraph_art_server.training.trainer import OutOfMemory, TaskFailed, Trainer, WorkerDied, WorkerKilled

log = logging.getLogger(__name__)

MAX_WORKER_DEATHS = 3
"""How often a job may lose its worker with one packing plan before it fails."""
_OPEN_CALLS_TIMEOUT = 30.0
_RETRY = 5.0
CHECKPOINTS = "checkpoints"


class Runner:
    """The queue's worker loop and its progress reports."""

    def __init__(
        self,
        *,
        data_dir: Path,
        jobs: JobStore,
        policies: PolicyStore,
        calls: CallStore,
        gateway: Gateway,
        adapters: Adapters,
        compute: ComputeLease,
        trainer: Trainer,
        chat_tokenizer: ChatTokenizer,
        teachers: Mapping[str, Teacher],
    ) -> None:
        self._data_dir = data_dir
        self._jobs = jobs
        self._policies = policies
        self._calls = calls
        self._gateway = gateway
        self._adapters = adapters
        self._compute = compute
        self._trainer = trainer
        self._chat_tokenizer = chat_tokenizer
        self._teachers = teachers
        self._queued = asyncio.Event()
        self._changed = asyncio.Condition()
        # (packs done, packs in all) of the job in hand; not worth storing.
        self._progress: dict[str, tuple[int, int]] = {}
        # The plan with which a job's worker was last killed.
        self._killed: dict[str, PackingPlan] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Clear what a crash left behind and begin to work."""
        self._delete_orphans()
        self._tasks = [asyncio.create_task(self._work()), asyncio.create_task(self._warm_up())]

    async def stop(self) -> None:
        """Stop working. The job in hand is begun again by the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._trainer.stop()

    async def submit(self, submission: Submission | SftSubmission) -> Job:
        """Store a submission and let it be worked on."""
        job = await asyncio.to_thread(self._jobs.add, submission)
        self._queued.set()
        return job

    async def job(self, job_id: str) -> Job:
        """A job as it is now, progress included."""
        job = await asyncio.to_thread(self._jobs.get, job_id)
        job.done, job.total = self._progress.get(job_id, (job.done, job.total))
        return job

    async def follow(self, job_id: str) -> AsyncIterator[Job]:
        """A job every time it changes, until it has ended."""
        while True:
            async with self._changed:
                job = await self.job(job_id)
            yield job
            if job.state in ("finished", "failed"):
                return
            async with self._changed:
                if await self.job(job_id) == job:
                    await self._changed.wait()

    async def _work(self) -> None:
        while True:
            self._queued.clear()
            try:
                job_id = await asyncio.to_thread(self._jobs.next, "trained", "running", "queued")
                if job_id is None:
                    await self._queued.wait()
                else:
                    await self._process(job_id)
            except Exception:
                # The queue must go on: a full disk may have room again, a locked database may be free.
                log.exception("the queue stumbled; trying again in %.0f s", _RETRY)
                await asyncio.sleep(_RETRY)

    async def _warm_up(self) -> None:
        """Start the trainer before it is needed, so that a model it refuses is known before anybody rolls out."""
        try:
            await self._gateway.wait_ready()
            if not self._trainer.gives_way:
                await self._trainer.start()
        except (Unavailable, WorkerDied) as error:
            log.error("policies cannot be trained: %s", error)

    async def _process(self, job_id: str) -> None:
        job = await asyncio.to_thread(self._jobs.get, job_id)
        if job.state != "trained":
            try:
                await self._train(job)
            except (OSError, OperationalError, Unavailable):
                raise
            except WorkerDied as error:
                deaths = await asyncio.to_thread(self._jobs.worker_died, job_id)
                log.warning("job %s lost its worker, time %d of %d: %s", job_id, deaths, MAX_WORKER_DEATHS, error)
                if deaths >= MAX_WORKER_DEATHS:
                    await self._fail(job_id, str(error))
                return
            except TaskFailed as error:
                await self._fail(job_id, str(error))
                return
            except Exception:
                log.exception("job %s", job_id)
                await self._fail(job_id, "the server failed on this job; its log has the details")
                return
        job = await asyncio.to_thread(self._jobs.get, job_id)
        assert job.result is not None  # the state says so
        begun = time.monotonic()
        for update in job.result.updates:
            if update.version != update.parent:
                await self._serve(job_id, update.policy, update.version)
        job.result.seconds["load"] = time.monotonic() - begun
        await asyncio.to_thread(self._jobs.finish, job_id, job.result)
        self._forget(job_id)
        await self._notify()

    async def _train(self, job: Job) -> None:
        """Train and commit."""
        await asyncio.to_thread(self._jobs.begin, job.id)
        await self._notify()
        begun = time.time()
        seconds = {"queue": begun - job.created_at.timestamp()}
        submission = await asyncio.to_thread(self._jobs.submission, job.id)
        skipped: Counter[str] = Counter()
        warnings: list[str] = []
        task: TrainTask | SftTask
        if isinstance(submission, SftSubmission):
            task = await self._sft_task(job.id, submission, skipped)
        else:
            task = await self._train_task(job.id, submission, skipped, warnings)
        seconds["join"] = time.time() - begun
        if isinstance(task, TrainTask) and task.config.teacher is not None:
            begun = time.time()
            await self._ask_teacher(task.config.teacher, task, skipped)
            seconds["teacher"] = time.time() - begun
        begun = time.time()
        trained = await self._compute_task(task)
        seconds["train"] = time.time() - begun
        skipped.update(trained.skipped)
        result = TrainResult(updates=trained.updates, skipped=dict(skipped), seconds=seconds, warnings=warnings)
        parts = {part.policy: part for part in _parts(task)}
        versions = [
            NewVersion(
                policy=update.policy,
                version=update.version,
                parent=update.parent,
                directory=str(Path(parts[update.policy].out_dir).relative_to(self._data_dir)),
                run_ids=trained.run_ids[update.policy],
            )
            for update in trained.updates
            if update.version != update.parent
        ]
        try:
            await asyncio.to_thread(self._jobs.commit, job.id, result, versions)
        except BaseException:
            # An error after the commit point must not take the new versions' files away.
            if (await asyncio.to_thread(self._jobs.get, job.id)).state != "trained":
                self._delete(task)
            raise

    async def _compute_task(self, task: TrainTask | SftTask) -> Trained:
        """Have a task computed with the job's packing plan, and with a smaller one each time that memory runs out."""
        async with self._compute.update():
            try:
                return await self._compute_planned(task)
            finally:
                if self._trainer.gives_way:
                    await self._trainer.stop()

    async def _compute_planned(self, task: TrainTask | SftTask) -> Trained:
        job_id = task.task_id
        plan = await asyncio.to_thread(self._jobs.plan, job_id)
        if plan is None:
            plan = await self._trainer.plan()
            await asyncio.to_thread(self._jobs.keep_plan, job_id, plan)
        while True:
            planned = task.model_copy(
                update={"token_budget": plan.token_budget, "checkpointing": plan.checkpointing},
            )
            await self._trainer.start()  # a worker that dies before it has the task says nothing about the plan
            try:
                return await self._trainer.train(planned, lambda done, total: self._on_progress(job_id, done, total))
            except OutOfMemory as error:
                self._delete(task)
                plan = error.plan
                log.warning("job %s ran out of memory; trying again with %s", job_id, plan)
                await asyncio.to_thread(self._jobs.keep_plan, job_id, plan)
            except WorkerKilled as error:
                self._delete(task)
                # One kill may be an operator's, and must change nothing; the kernel's comes again with the same plan.
                again = self._killed.get(job_id) == plan
                self._killed[job_id] = plan
                smaller = _smaller(task, plan, error) if again else None
                if smaller is None:
                    raise
                plan = smaller
                log.warning("job %s had its worker killed twice with one plan; trying again with %s", job_id, plan)
                await asyncio.to_thread(self._jobs.keep_plan, job_id, plan)
            except BaseException:
                self._delete(task)
                raise

    async def _train_task(
        self, job_id: str, submission: Submission, skipped: Counter[str], warnings: list[str]
    ) -> TrainTask:
        """The submission joined with its tokens."""
        runs = [run for group in submission.groups for run in group.runs]
        call_ids = [claim.call_id for run in runs for claim in run.calls]
        await self._gateway.wait_closed(call_ids, _OPEN_CALLS_TIMEOUT)
        records = await asyncio.to_thread(self._calls.of_ids, call_ids)
        trained = await asyncio.to_thread(self._jobs.already_trained, [run.run_id for run in runs])
        names = await asyncio.to_thread(self._policies.names)
        heads = {name: await asyncio.to_thread(self._policies.head, name) for name in names}
        joined = join(submission, records, {name: head.latest for name, head in heads.items()}, trained)
        recorded = await asyncio.to_thread(self._calls.ids_of_runs, [run.run_id for run in runs])
        if unclaimed := len(recorded - set(call_ids)):
            joined.skipped["call:unclaimed"] = unclaimed
        skipped.update(joined.skipped)
        warnings.extend(joined.warnings)
        references = await self._references(submission.config.kl_reference)
        parts = [
            PolicyTask(
                **self._lineage(policy, heads[policy]).model_dump(),
                reference_dir=references.get(policy),
                groups=groups,
            )
            for policy, groups in sorted(joined.groups.items())
        ]
        return TrainTask(task_id=job_id, config=submission.config, policies=parts)

    async def _sft_task(self, job_id: str, submission: SftSubmission, skipped: Counter[str]) -> SftTask:
        """The examples as tokens: those that were sampled, for recorded calls, else those of the chat template."""
        claimed = [example.call_id for example in submission.examples if isinstance(example, RecordedExample)]
        chats = [example for example in submission.examples if isinstance(example, ChatExample)]
        await self._gateway.wait_closed(claimed, _OPEN_CALLS_TIMEOUT)
        sequences = recorded_answers(claimed, await asyncio.to_thread(self._calls.of_ids, claimed), skipped)
        if chats:
            await self._need_engine("to tokenize examples")
            sequences += await self._chat_tokenizer.sequences(chats, skipped)
        if not sequences:
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
            raise TaskFailed(f"no example is left to fine-tune policy {submission.policy} on ({reasons})")
        head = await asyncio.to_thread(self._policies.head, submission.policy)
        return SftTask(
            task_id=job_id,
            config=submission.config,
            policy=self._lineage(submission.policy, head),
            examples=sequences,
        )

    async def _need_engine(self, why: str) -> None:
        """Wait until the engine serves; the job fails if it will not, instead of keeping all others waiting."""
        try:
            await self._gateway.wait_ready()
        except Unavailable as error:
            raise TaskFailed(f"the engine is needed {why}, but {error.message}") from error

    def _lineage(self, policy: str, head: Head) -> Lineage:
        # Unique to this attempt: nothing of an earlier one can be taken for this one's.
        out_dir = self._data_dir / CHECKPOINTS / policy / f"{head.latest + 1}-{uuid.uuid4().hex[:12]}"
        return Lineage(
            policy=policy,
            lora=head.lora,
            parent=head.latest,
            parent_dir=None if head.directory is None else str(self._data_dir / head.directory),
            version=head.latest + 1,
            out_dir=str(out_dir),
        )

    async def _references(self, wanted: Mapping[str, int]) -> dict[str, str]:
        """Checkpoint directories of the versions to stay close to; version 0, the base model, has none."""
        found = {}
        for policy, version in wanted.items():
            try:
                directory = await asyncio.to_thread(self._policies.directory, policy, version)
            except NotFound as error:
                raise TaskFailed(f"kl_reference: {await self._what_there_is(policy, error)}") from error
            if directory is not None:
                found[policy] = str(self._data_dir / directory)
        return found

    async def _what_there_is(self, policy: str, error: NotFound) -> str:
        names = await asyncio.to_thread(self._policies.names)
        if policy not in names:
            return f"no policy is called {policy!r}; there are {', '.join(names)}"
        versions = (await asyncio.to_thread(self._policies.get, policy)).versions
        return f"{error.message}; it has {', '.join(str(version.version) for version in versions)}"

    async def _ask_teacher(self, name: str, task: TrainTask, skipped: Counter[str]) -> None:
        """Fill in what the teacher says to every sampled token; serving goes on meanwhile."""
        if name not in self._teachers:
            known = ", ".join(sorted(self._teachers)) or "none"
            raise TaskFailed(
                f"no teacher is called {name!r} (known: {known}); start the server with --teacher {name}=URL"
            )
        calls = [call for part in task.policies for group in part.groups for run in group.runs for call in run.calls]
        await self._need_engine("to compare its tokens with the teacher's")
        try:
            await self._teachers[name].score(calls, skipped)
        except TeacherFailed as error:
            raise TaskFailed(str(error)) from error

    async def _serve(self, job_id: str, policy: str, version: int) -> None:
        """Load a version, as long as it takes, and move the plain name to it."""
        while True:
            try:
                await self._adapters.load(policy, version)
                break
            except NotFound:
                break  # of another base model than this server's: a server of its own will load it when it is asked for
            except Unavailable as error:
                log.warning("%s@%d is trained, not serving yet: %s", policy, version, error.message)
                await asyncio.to_thread(self._jobs.not_serving, job_id, f"{policy}@{version}: {error.message}")
                await self._notify()
                await asyncio.sleep(_RETRY)
        await asyncio.to_thread(self._policies.mark_serving, policy, version)
        log.info("%s@%d is serving", policy, version)

    async def _fail(self, job_id: str, error: str) -> None:
        await asyncio.to_thread(self._jobs.fail, job_id, error)
        self._forget(job_id)
        await self._notify()

    def _forget(self, job_id: str) -> None:
        self._progress.pop(job_id, None)
        self._killed.pop(job_id, None)

    def _on_progress(self, job_id: str, done: int, total: int) -> None:
        self._progress[job_id] = (done, total)
        self._notifying = asyncio.ensure_future(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _delete(self, task: TrainTask | SftTask) -> None:
        for part in _parts(task):
            shutil.rmtree(part.out_dir, ignore_errors=True)

    def _delete_orphans(self) -> None:
        """Delete checkpoint directories that no committed version owns."""
        owned = self._policies.directories()
        for directory in (self._data_dir / CHECKPOINTS).glob("*/*"):
            if directory.is_dir() and str(directory.relative_to(self._data_dir)) not in owned:
                log.info("deleting %s, left by an update that did not finish", directory.name)
                shutil.rmtree(directory)


def _parts(task: TrainTask | SftTask) -> Sequence[Lineage]:
    return task.policies if isinstance(task, TrainTask) else [task.policy]


def _smaller(task: TrainTask | SftTask, plan: PackingPlan, error: BaseException) -> PackingPlan | None:
    """The next smaller packing plan; ``None`` if there is none."""
    if isinstance(task, SftTask):
        lengths = [len(example.prompt_ids) + len(example.answer_ids) for example in task.examples]
    else:
        runs = (run for part in task.policies for group in part.groups for run in group.runs)
        lengths = [len(call.prompt_ids) + len(call.sampled_ids) for run in runs for call in run.calls]
    try:
        less = smaller_plan(
            task.task_id, plan.token_budget, plan.checkpointing, longest=max(lengths, default=0), error=error
        )
    except MemoryError:
        return None
    return PackingPlan(less.token_budget, less.checkpointing)
