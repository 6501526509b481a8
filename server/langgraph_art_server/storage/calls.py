"""The call store: what the engine saw and sampled, one row for each call, attempt and choice.

Invariant: a call is written once, before its answer ends (or when it is abandoned), and never changed, until its run
is deleted as a whole: because somebody asked for it, or because no submission claimed it for long.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import numpy as np
from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    and_,
    delete,
    exists,
    func,
    insert,
    not_,
    select,
    update,
)

from langgraph_art.protocol import (
    CallStoreInfo,
    DeletedRun,
    RecordedCall,
    RecordedExample,
    SftSubmission,
    Submission,
)
from langgraph_art_server.errors import Conflict
from langgraph_art_server.storage.database import Database
from langgraph_art_server.storage.prompts import PromptWriter, pack, read_prompts, unpack
from langgraph_art_server.storage.schema import calls, claims, jobs, pins, trained_runs

_BOUND_VALUES = 500  # SQLite limits how many a statement may have


class CallStore:
    """Reads and writes recorded calls."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._prompts = PromptWriter()
        self._prompts_lock = threading.Lock()
        self._expired = 0

    def save(self, recorded: Iterable[RecordedCall]) -> None:
        """Store calls in one transaction. The same (call id, attempt, choice) twice replaces the first record."""
        with self._writing() as connection:
            for call in recorded:
                key = and_(
                    calls.c.call_id == call.call_id, calls.c.attempt == call.attempt, calls.c.choice == call.choice
                )
                replaced = connection.execute(delete(calls).where(key).returning(calls.c.prompt)).scalars().all()
                prompt = self._prompts.write(connection, call.prompt_ids)
                connection.execute(insert(calls).values(**_row(call), prompt=prompt))
                self._prompts.release(connection, replaced)

    def of_run(self, run_id: str) -> list[RecordedCall]:
        """All records of a run, oldest first, retried attempts and unused choices included."""
        return self._read(calls.c.run_id == run_id)

    def ids_of_runs(self, run_ids: Sequence[str]) -> set[str]:
        """Ids of all calls recorded for these runs."""
        found: set[str] = set()
        with self._database.read() as connection:
            for start in range(0, len(run_ids), _BOUND_VALUES):
                query = select(calls.c.call_id).where(calls.c.run_id.in_(run_ids[start : start + _BOUND_VALUES]))
                found.update(connection.execute(query).scalars())
        return found

    def of_ids(self, call_ids: Sequence[str]) -> dict[str, list[RecordedCall]]:
        """Records by call id; ids without a record are absent."""
        found: dict[str, list[RecordedCall]] = {}
        for start in range(0, len(call_ids), _BOUND_VALUES):
            for call in self._read(calls.c.call_id.in_(call_ids[start : start + _BOUND_VALUES])):
                found.setdefault(call.call_id, []).append(call)
        return found

    def info(self) -> CallStoreInfo:
        """How much is stored."""
        with self._database.read() as connection:
            return CallStoreInfo(
                calls=connection.execute(select(func.count()).select_from(calls)).scalar_one(),
                unclaimed=connection.execute(select(func.count()).select_from(calls).where(_UNCLAIMED)).scalar_one(),
                expired=self._expired,
                bytes=self._database.size(),
            )

    def expire(self, before: datetime) -> int:
        """Delete unclaimed calls made before a time, and pins; returns how many calls.

        The calls of a run go together, once the last one is old enough.
        """
        cutoff = before.timestamp()
        later = calls.alias()
        goes_on = exists().where(later.c.run_id == calls.c.run_id, later.c.created_at >= cutoff).correlate(calls)
        expired = and_(calls.c.created_at < cutoff, _UNCLAIMED, not_(goes_on))
        with self._database.read() as connection:  # it looks at every call, and nothing should wait for that
            found = connection.execute(select(calls.c.id).where(expired)).scalars().all()
        count = 0
        for start in range(0, len(found), _BOUND_VALUES):
            with self._writing() as connection:
                # Asked again, because a submission may have come in between.
                batch = delete(calls).where(calls.c.id.in_(found[start : start + _BOUND_VALUES]), expired)
                freed = connection.execute(batch.returning(calls.c.prompt)).scalars().all()
                self._prompts.release(connection, freed)
            count += len(freed)
        used = select(calls.c.run_id).where(calls.c.created_at >= cutoff, calls.c.run_id.is_not(None))
        with self._database.write() as connection:
            connection.execute(delete(pins).where(pins.c.created_at < cutoff, pins.c.pin.not_in(used)))
        self._database.overwrite_deleted()
        self._expired += count
        return count

    def delete_run(self, run_id: str) -> DeletedRun:
        """Delete all that is stored of a run but the note into which versions it was trained.

        Its bytes are overwritten. The note keeps the run from being trained twice, and says whose weights hold it.

        Raises:
            Conflict: A job that has not been trained yet holds the run.
        """
        with self._writing(durable=True) as connection:
            call_ids = set(connection.execute(select(calls.c.call_id).where(calls.c.run_id == run_id)).scalars())
            stripped = _strip_jobs(connection, run_id, call_ids)
            of_run = delete(calls).where(calls.c.run_id == run_id).returning(calls.c.prompt)
            freed = connection.execute(of_run).scalars().all()
            self._prompts.release(connection, freed)
            for claimed in (run_id, *call_ids):
                connection.execute(delete(claims).where(claims.c.id == claimed))
            unpinned = connection.execute(delete(pins).where(pins.c.pin == run_id)).rowcount
            query = select(trained_runs.c.policy, trained_runs.c.version).where(trained_runs.c.run_id == run_id)
            trained = [f"{policy}@{version}" for policy, version in connection.execute(query)]
        self._database.overwrite_deleted()
        return DeletedRun(run_id=run_id, calls=len(freed), pins=unpinned, jobs=stripped, trained_into=sorted(trained))

    @contextmanager
    def _writing(self, *, durable: bool = False) -> Iterator[Connection]:
        """A transaction that may write and release prompts."""
        with self._prompts_lock:
            try:
                with self._database.write(durable=durable) as connection:
                    yield connection
            except BaseException:
                self._prompts.forget_all()
                raise

    def _read(self, which: ColumnElement[bool]) -> list[RecordedCall]:
        with self._database.read() as connection:
            prompts = read_prompts(connection, select(calls.c.prompt).where(which))
            rows = connection.execute(select(calls).where(which).order_by(calls.c.created_at)).mappings()
            return [_call(row, prompts[row["prompt"]]) for row in rows]


_UNCLAIMED = and_(
    not_(exists().where(claims.c.id == calls.c.run_id).correlate(calls)),
    not_(exists().where(claims.c.id == calls.c.call_id).correlate(calls)),
)


def claim(connection: Connection, submission: Submission | SftSubmission) -> None:
    """Note the runs and calls that a submission names, recorded already or still to come: they do not expire."""
    if isinstance(submission, SftSubmission):
        named = {example.call_id for example in submission.examples if isinstance(example, RecordedExample)}
    else:
        named = {run.run_id for group in submission.groups for run in group.runs}
    if named:
        connection.execute(insert(claims).prefix_with("OR IGNORE"), [{"id": name} for name in named])


def _strip_jobs(connection: Connection, run_id: str, call_ids: set[str]) -> int:
    """Take a run, and examples made from it, out of the stored bodies of ended jobs; returns of how many."""
    stripped = 0
    for job_id, state, packed in connection.execute(select(jobs.c.id, jobs.c.state, jobs.c.body)).all():
        body = json.loads(zlib.decompress(packed))
        parts = [group["runs"] for group in body.get("groups", [])] + [body.get("examples", [])]
        kept = [[item for item in part if not _is_of(item, run_id, call_ids)] for part in parts]
        if kept == parts:
            continue
        if state in ("queued", "running"):
            raise Conflict(f"run {run_id} is in job {job_id}, which is {state}: wait for the job", code="run_in_use")
        for part, rest in zip(parts, kept, strict=True):
            part[:] = rest
        # The body's hash stays that of what was sent, so the submission's key still answers with this job.
        connection.execute(
            update(jobs).where(jobs.c.id == job_id).values(body=zlib.compress(json.dumps(body).encode()))
        )
        stripped += 1
    return stripped


def _is_of(item: dict[str, Any], run_id: str, call_ids: set[str]) -> bool:
    """Whether a submitted run, or an example to learn from, is of this run."""
    return item.get("run_id") == run_id or item.get("call_id") in call_ids


def _row(call: RecordedCall) -> dict[str, Any]:
    row = call.model_dump(exclude={"prompt_ids"})
    row["created_at"] = call.created_at.timestamp()
    row["sampled_ids"] = pack(call.sampled_ids)
    row["logprobs"] = np.asarray(call.logprobs, dtype="<f4").tobytes()
    return row


def _call(row: RowMapping, prompt_ids: list[int]) -> RecordedCall:
    own = {name: value for name, value in row.items() if name not in ("id", "prompt")}
    own["created_at"] = datetime.fromtimestamp(row["created_at"], UTC)
    own["sampled_ids"] = unpack(row["sampled_ids"]).tolist()
    own["logprobs"] = np.frombuffer(row["logprobs"], dtype="<f4").tolist()
    return RecordedCall(**own, prompt_ids=prompt_ids)
