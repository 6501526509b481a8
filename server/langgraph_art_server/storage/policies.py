"""Policies, their versions and the pins that tie runs to versions.

Invariant: version numbers only increase and are never reused; a pin never changes once made.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Connection, insert, select, update

from langgraph_art.protocol import CreatePolicy, LoraConfig, Policy, PolicyVersion
from langgraph_art_server.errors import BadRequest, Conflict, NotFound
from langgraph_art_server.storage.database import Database
from langgraph_art_server.storage.schema import pins, policies, versions


@dataclass(frozen=True)
class Head:
    """What the next update of a policy starts from."""

    lora: LoraConfig
    latest: int
    """The newest version, served or not: the parent of the next one."""
    directory: str | None
    """Checkpoint of ``latest``, relative to the data directory; ``None`` for version 0."""


class PolicyStore:
    """Reads and writes policies.

    Args:
        database: Where they are kept.
        base_model: Name of the base model, which no policy may have.
        max_rank: Largest adapter rank that the engine serves.
    """

    def __init__(self, database: Database, *, base_model: str, max_rank: int) -> None:
        self._database = database
        self._base_model = base_model
        self._max_rank = max_rank

    def create(self, request: CreatePolicy) -> Policy:
        """Create a policy at version 0, or return the one that exists with the same adapter shape.

        Raises:
            BadRequest: It could never be served here.
            Conflict: The name exists with another adapter shape.
        """
        if request.name == self._base_model:
            raise BadRequest(f"{request.name!r} is the base model's name: give the policy another one")
        if request.lora.rank > self._max_rank:
            raise BadRequest(
                f"policy {request.name!r}: rank {request.lora.rank} is above the {self._max_rank} that this server "
                "can serve; start it with a larger --max-lora-rank"
            )
        now = time.time()
        with self._database.write(durable=True) as connection:
            row = connection.execute(select(policies).where(policies.c.name == request.name)).mappings().first()
            if row is None:
                connection.execute(
                    insert(policies).values(
                        name=request.name,
                        **request.lora.model_dump(),
                        serving_version=0,
                        latest_version=0,
                        created_at=now,
                    )
                )
                connection.execute(insert(versions).values(policy=request.name, version=0, loaded=True, created_at=now))
            elif (existing := _lora(row)) != request.lora:
                raise Conflict(
                    f"policy {request.name!r} exists with {existing!r}, asked for {request.lora!r}. "
                    "An adapter's shape is fixed: use another name."
                )
        return self.get(request.name)

    def all(self) -> list[Policy]:
        """All policies by name."""
        by_policy = defaultdict(list)
        with self._database.read() as connection:
            rows = connection.execute(select(policies).order_by(policies.c.name)).mappings().all()
            for version in connection.execute(select(versions).order_by(versions.c.version)).mappings():
                by_policy[version["policy"]].append(
                    PolicyVersion(
                        version=version["version"],
                        parent=version["parent"],
                        job_id=version["job_id"],
                        created_at=datetime.fromtimestamp(version["created_at"], UTC),
                        serving=version["loaded"],
                    )
                )
        return [
            Policy(name=row["name"], lora=_lora(row), version=row["serving_version"], versions=by_policy[row["name"]])
            for row in rows
        ]

    def get(self, name: str) -> Policy:
        """One policy.

        Raises:
            NotFound: No policy has this name.
        """
        for policy in self.all():
            if policy.name == name:
                return policy
        raise NotFound(f"no policy is called {name!r}")

    def names(self) -> list[str]:
        """Names of all policies."""
        with self._database.read() as connection:
            return list(connection.execute(select(policies.c.name).order_by(policies.c.name)).scalars())

    def serving_version(self, name: str) -> int | None:
        """The version that the plain name means now, or ``None`` if there is no such policy."""
        with self._database.read() as connection:
            return connection.execute(
                select(policies.c.serving_version).where(policies.c.name == name)
            ).scalar_one_or_none()

    def directory(self, name: str, version: int) -> str | None:
        """Checkpoint directory of a version, relative to the data directory; ``None`` for version 0.

        Raises:
            NotFound: There is no such version.
        """
        with self._database.read() as connection:
            row = connection.execute(
                select(versions.c.directory).where(versions.c.policy == name, versions.c.version == version)
            ).first()
        if row is None:
            raise NotFound(f"policy {name!r} has no version {version}")
        directory: str | None = row[0]
        return directory

    def pin(self, pin: str, name: str) -> int | None:
        """The version that ``pin`` is tied to, tied to the one now serving on first use; ``None``: no such policy."""
        with self._database.write() as connection:
            query = select(pins.c.version).where(pins.c.pin == pin, pins.c.policy == name)
            version: int | None = connection.execute(query).scalar_one_or_none()
            if version is None:
                version = connection.execute(
                    select(policies.c.serving_version).where(policies.c.name == name)
                ).scalar_one_or_none()
                if version is not None:
                    connection.execute(
                        insert(pins).values(pin=pin, policy=name, version=version, created_at=time.time())
                    )
        return version

    def head(self, name: str) -> Head:
        """What the next update of a policy starts from."""
        with self._database.read() as connection:
            row = connection.execute(select(policies).where(policies.c.name == name)).mappings().one()
        latest = row["latest_version"]
        return Head(lora=_lora(row), latest=latest, directory=self.directory(name, latest))

    def mark_serving(self, name: str, version: int) -> None:
        """Move the plain name to a version that the engine has loaded."""
        with self._database.write(durable=True) as connection:
            connection.execute(
                update(versions).where(versions.c.policy == name, versions.c.version == version).values(loaded=True)
            )
            connection.execute(update(policies).where(policies.c.name == name).values(serving_version=version))

    def directories(self) -> set[str]:
        """Every checkpoint directory that a version owns, relative to the data directory."""
        with self._database.read() as connection:
            found = connection.execute(select(versions.c.directory)).scalars()
            return {directory for directory in found if directory is not None}


def add_version(connection: Connection, *, policy: str, version: int, parent: int, job_id: str, directory: str) -> None:
    """Add a trained version inside the transaction that commits its job."""
    connection.execute(
        insert(versions).values(
            policy=policy,
            version=version,
            parent=parent,
            job_id=job_id,
            directory=directory,
            loaded=False,
            created_at=time.time(),
        )
    )
    connection.execute(update(policies).where(policies.c.name == policy).values(latest_version=version))


def _lora(row: object) -> LoraConfig:
    return LoraConfig(rank=row["rank"], alpha=row["alpha"], seed=row["seed"])  # type: ignore[index]
