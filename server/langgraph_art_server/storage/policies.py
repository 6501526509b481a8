"""Policies, their versions and the pins that tie runs to versions.

Invariant: version numbers only increase and are never reused; a pin never changes once made. A policy belongs to the
base model that it was created on: a server of another one does not know it, so calls of two bases never mix.
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
        linears: Layers of the base model that the engine serves adapters on, see :func:`served_linears`.
    """

    def __init__(self, database: Database, *, base_model: str, max_rank: int, linears: frozenset[str]) -> None:
        self._database = database
        self._base_model = base_model
        self._max_rank = max_rank
        self._linears = linears
        self._ours = policies.c.base_model == base_model
        with database.write() as connection:
            # Policies from before this column existed.
            connection.execute(update(policies).where(policies.c.base_model.is_(None)).values(base_model=base_model))

    def create(self, request: CreatePolicy) -> Policy:
        """Create a policy at version 0, or return the one that exists with the same adapter shape.

        Raises:
            BadRequest: It could never be served here.
            Conflict: The name exists with another adapter shape, or on another base model.
        """
        if request.name == self._base_model:
            raise BadRequest(f"{request.name!r} is the base model's name: give the policy another one")
        if request.lora.rank > self._max_rank:
            raise BadRequest(
                f"policy {request.name!r}: rank {request.lora.rank} is above the {self._max_rank} that this server "
                "can serve; start it with a larger --max-lora-rank"
            )
        if unserved := sorted(set(request.lora.targets or []) - self._linears):
            raise BadRequest(
                f"policy {request.name!r}: adapters on {', '.join(unserved)} cannot be served; targets can be any of "
                f"{', '.join(sorted(self._linears))}, or left out for all of them"
            )
        now = time.time()
        with self._database.write(durable=True) as connection:
            row = connection.execute(select(policies).where(policies.c.name == request.name)).mappings().first()
            if row is None:
                connection.execute(
                    insert(policies).values(
                        name=request.name,
                        **request.lora.model_dump(),
                        base_model=self._base_model,
                        serving_version=0,
                        latest_version=0,
                        created_at=now,
                    )
                )
                connection.execute(insert(versions).values(policy=request.name, version=0, loaded=True, created_at=now))
            elif row["base_model"] != self._base_model:
                raise Conflict(
                    f"policy {request.name!r} belongs to the base model {row['base_model']}, and this server serves "
                    f"{self._base_model}: use another name, or another --data-dir."
                )
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
            rows = connection.execute(select(policies).where(self._ours).order_by(policies.c.name)).mappings().all()
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
            return list(
                connection.execute(select(policies.c.name).where(self._ours).order_by(policies.c.name)).scalars()
            )

    def serving_version(self, name: str) -> int | None:
        """The version that the plain name means now, or ``None`` if there is no such policy."""
        with self._database.read() as connection:
            return self._serving_version(connection, name)

    def _serving_version(self, connection: Connection, name: str) -> int | None:
        query = select(policies.c.serving_version).where(policies.c.name == name, self._ours)
        return connection.execute(query).scalar_one_or_none()

    def directory(self, name: str, version: int) -> str | None:
        """Checkpoint directory of a version, relative to the data directory; ``None`` for version 0.

        Raises:
            NotFound: There is no such version.
        """
        with self._database.read() as connection:
            row = connection.execute(
                select(versions.c.directory)
                .join(policies, policies.c.name == versions.c.policy)
                .where(versions.c.policy == name, versions.c.version == version, self._ours)
            ).first()
        if row is None:
            raise NotFound(f"policy {name!r} has no version {version}")
        directory: str | None = row[0]
        return directory

    def pin(self, pin: str, name: str) -> int | None:
        """The version that ``pin`` is tied to, tied to the one now serving on first use; ``None``: no such policy."""
        with self._database.write() as connection:
            serving = self._serving_version(connection, name)
            query = select(pins.c.version).where(pins.c.pin == pin, pins.c.policy == name)
            pinned: int | None = connection.execute(query).scalar_one_or_none()
            if serving is None or pinned is not None:
                return pinned if serving is not None else None
            connection.execute(insert(pins).values(pin=pin, policy=name, version=serving, created_at=time.time()))
        return serving

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
    return LoraConfig(rank=row["rank"], alpha=row["alpha"], targets=row["targets"], seed=row["seed"])  # type: ignore[index]
