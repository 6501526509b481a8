"""Jobs: submissions on disk, from accepted to finished.

Invariant: a submission is stored before it is acknowledged, and the transaction that ends its training also adds every
new version and marks every trained run. So a job either trained as a whole, once, or not at all. The packing plan is
stored before anything is computed with it, so a retry computes what the attempt before it did.
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

from langgraph_art.protocol import Job, JobState, SftSubmission, Submission, TrainResult
from langgraph_art_server.errors import Conflict, NotFound
from langgraph_art_server.storage.calls import claim
from langgraph_art_server.storage.database import Database
from langgraph_art_server.storage.policies import add_version
from langgraph_art_server.storage.schema import jobs, trained_runs


@dataclass(frozen=True)
class NewVersion:
    """A version that a job trained: its checkpoint directory and the runs that RL may not train again."""

    policy: str
    version: int
    parent: int
    directory: str
    run_ids: Sequence[str]


@dataclass(frozen=True)
class PackingPlan:
    """What decides, with the tokens, which forward passes a job is computed in."""

    token_budget: int
    """Tokens per pack."""
    checkpointing: bool
    """Whether activations are computed again in the backward pass."""


class JobStore:
    """Reads and writes jobs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, submission: Submission | SftSubmission) -> Job:
        """Store a submission durably, or return the job that its idempotency key already has.

        A job that failed trained nothing, so the same submission again queues it again, and its packing is planned
        anew: the old plan may be why it failed.

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
                        kind="sft" if isinstance(submission, SftSubmission) else "train",
                        idempotency_key=submission.idempotency_key,
                        body_sha256=digest,
                        body=zlib.compress(body),
                        state="queued",
                        worker_deaths=0,
                        created_at=time.time(),
                    )
                )
                claim(connection, submission)
                row = connection.execute(query).mappings().one()
            elif row["state"] == "failed" and row["body_sha256"] == digest:
                fresh = {"error": None, "worker_deaths": 0, "token_budget": None, "checkpointing": None}
                # The body as well: a run that was deleted in between has been taken out of the stored one.
                again = update(jobs).where(jobs.c.id == row["id"])
                connection.execute(again.values(state="queued", body=zlib.compress(body), **fresh))
                claim(connection, submission)
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

    def submission(self, job_id: str) -> Submission | SftSubmission:
        """The body that a job was made from."""
        with self._database.read() as connection:
            kind, body = connection.execute(select(jobs.c.kind, jobs.c.body).where(jobs.c.id == job_id)).one()
        return (SftSubmission if kind == "sft" else Submission).model_validate_json(zlib.decompress(body))

    def plan(self, job_id: str) -> PackingPlan | None:
        """The packing plan of a job; ``None`` until it has one."""
        with self._database.read() as connection:
            budget, checkpointing = connection.execute(
                select(jobs.c.token_budget, jobs.c.checkpointing).where(jobs.c.id == job_id)
            ).one()
        return None if budget is None else PackingPlan(budget, checkpointing)

    def keep_plan(self, job_id: str, plan: PackingPlan) -> None:
        """Store the packing plan that the job will be computed with from here on; the deaths before it do not count."""
        with self._database.write(durable=True) as connection:
            connection.execute(
                update(jobs)
                .where(jobs.c.id == job_id)
                .values(token_budget=plan.token_budget, checkpointing=plan.checkpointing, worker_deaths=0)
            )

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
                if new.run_ids:  # an empty list would insert one row of defaults
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
        kind=row["kind"],
        idempotency_key=row["idempotency_key"],
        state=row["state"],
        created_at=datetime.fromtimestamp(row["created_at"], UTC),
        result=None if row["result"] is None else TrainResult.model_validate(row["result"]),
        error=row["error"],
    )
