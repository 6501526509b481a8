"""Jobs: submissions on disk, from accepted to finished.

Invariant: a submission is stored before it is acknowledged, and the transaction that ends its training also adds every
new version and marks every trained run. So a job either trained as a whole, once, or not at all.
"""

from __future__ import annotations

import hashlib
import time
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import RowMapping, func, insert, select, update

from langgraph_art.protocol import Job, JobState, Submission, TrainResult
from langgraph_art_server.errors import Conflict, NotFound
from langgraph_art_server.storage.database import Database
from langgraph_art_server.storage.policies import add_version
from langgraph_art_server.storage.schema import jobs, trained_runs


@dataclass(frozen=True)
class NewVersion:
    """A version that a job trained: its checkpoint directory and the runs that went into it."""

    policy: str
    version: int
    parent: int
    directory: str
    run_ids: Sequence[str]


class JobStore:
    """Reads and writes jobs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, submission: Submission) -> Job:
        """Store a submission durably, or return the job that its idempotency key already has.

        A job that failed trained nothing, so the same submission again queues it again.

        Raises:
            Conflict: The key was used with another body.
        """
        body = submission.model_dump_json().encode()
        digest = hashlib.sha256(body).hexdigest()
        with self._database.write(durable=True) as connection:
            query = select(jobs).where(jobs.c.idempotency_key == submission.idempotency_key)
            row = connection.execute(query).mappings().first()
            if row is None:
                last = connection.execute(select(func.max(jobs.c.sequence))).scalar() or 0
                connection.execute(
                    insert(jobs).values(
                        id=uuid.uuid4().hex,
                        sequence=last + 1,
                        idempotency_key=submission.idempotency_key,
                        body_sha256=digest,
                        body=zlib.compress(body),
                        state="queued",
                        worker_deaths=0,
                        created_at=time.time(),
                    )
                )
                row = connection.execute(query).mappings().one()
            elif row["state"] == "failed" and row["body_sha256"] == digest:
                connection.execute(
                    update(jobs).where(jobs.c.id == row["id"]).values(state="queued", error=None, worker_deaths=0)
                )
                row = connection.execute(query).mappings().one()
        if row["body_sha256"] != digest:
            raise Conflict(
                f"idempotency key {submission.idempotency_key!r} was used for another submission (job {row['id']}). "
                "Send each submission under a key of its own."
            )
        return _job(row)

    def get(self, job_id: str) -> Job:
        """One job.

        Raises:
            NotFound: There is no such job.
        """
        with self._database.read() as connection:
            row = connection.execute(select(jobs).where(jobs.c.id == job_id)).mappings().first()
        if row is None:
            raise NotFound(f"no job has the id {job_id!r}")
        return _job(row)

    def submission(self, job_id: str) -> Submission:
        """The body that a job was made from."""
        with self._database.read() as connection:
            body = connection.execute(select(jobs.c.body).where(jobs.c.id == job_id)).scalar_one()
        return Submission.model_validate_json(zlib.decompress(body))

    def next(self, *states: JobState) -> str | None:
        """Id of the oldest job in one of ``states``."""
        query = select(jobs.c.id).where(jobs.c.state.in_(states)).order_by(jobs.c.sequence).limit(1)
        with self._database.read() as connection:
            return connection.execute(query).scalar_one_or_none()

    def begin(self, job_id: str) -> None:
        """Mark a job as running."""
        with self._database.write(durable=True) as connection:
            connection.execute(update(jobs).where(jobs.c.id == job_id).values(state="running"))

    def worker_died(self, job_id: str) -> int:
        """Count a worker that died on a job; returns how many have."""
        with self._database.write(durable=True) as connection:
            connection.execute(update(jobs).where(jobs.c.id == job_id).values(worker_deaths=jobs.c.worker_deaths + 1))
            deaths: int = connection.execute(select(jobs.c.worker_deaths).where(jobs.c.id == job_id)).scalar_one()
        return deaths

    def commit(self, job_id: str, result: TrainResult, trained: Sequence[NewVersion]) -> None:
        """The commit point: the job, its new versions and its trained runs become true together."""
        with self._database.write(durable=True) as connection:
            connection.execute(
                update(jobs).where(jobs.c.id == job_id).values(state="trained", result=result.model_dump(mode="json"))
            )
            for new in trained:
                add_version(
                    connection,
                    policy=new.policy,
                    version=new.version,
                    parent=new.parent,
                    job_id=job_id,
                    directory=new.directory,
                )
                connection.execute(
                    insert(trained_runs),
                    [{"run_id": run_id, "policy": new.policy, "version": new.version} for run_id in new.run_ids],
                )

    def finish(self, job_id: str, result: TrainResult) -> None:
        """Every new version is serving."""
        with self._database.write(durable=True) as connection:
            connection.execute(
                update(jobs)
                .where(jobs.c.id == job_id)
                .values(state="finished", error=None, result=result.model_dump(mode="json"))
            )

    def not_serving(self, job_id: str, reason: str) -> None:
        """Note why a trained job's versions are not loaded yet."""
        with self._database.write() as connection:
            connection.execute(update(jobs).where(jobs.c.id == job_id).values(error=reason))

    def fail(self, job_id: str, error: str) -> None:
        """Nothing of the job was trained."""
        with self._database.write(durable=True) as connection:
            connection.execute(update(jobs).where(jobs.c.id == job_id).values(state="failed", error=error))

    def already_trained(self, run_ids: Sequence[str]) -> set[tuple[str, str]]:
        """Which of these runs were trained into which policy, as (run id, policy)."""
        found: set[tuple[str, str]] = set()
        with self._database.read() as connection:
            for start in range(0, len(run_ids), 500):
                query = select(trained_runs.c.run_id, trained_runs.c.policy).where(
                    trained_runs.c.run_id.in_(run_ids[start : start + 500])
                )
                found.update((run_id, policy) for run_id, policy in connection.execute(query))
        return found


def _job(row: RowMapping) -> Job:
    return Job(
        id=row["id"],
        idempotency_key=row["idempotency_key"],
        state=row["state"],
        created_at=datetime.fromtimestamp(row["created_at"], UTC),
        result=None if row["result"] is None else TrainResult.model_validate(row["result"]),
        error=row["error"],
    )
