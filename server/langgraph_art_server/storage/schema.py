"""The tables, said once. A change here goes with a new migration; a test compares the two.

Invariant: the data directory can move, so directories are stored relative to it. Times are seconds since the epoch.
"""

from __future__ import annotations

import json
import zlib
from uuid import UUID

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Dialect,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    TypeDecorator,
    UniqueConstraint,
)


class Identifier(TypeDecorator[str]):
    """An id that a client made up. Any text will do; a UUID, which most are, takes 17 bytes."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> bytes | None:
        """To the database: ``u`` or ``h`` and a UUID, written with or without dashes, or ``t`` and a text."""
        if value is None:
            return None
        try:
            uuid = UUID(value)
        except ValueError:
            return b"t" + value.encode()
        known = {str(uuid): b"u", uuid.hex: b"h"}
        return known[value] + uuid.bytes if value in known else b"t" + value.encode()

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> str | None:
        """From the database."""
        if value is None:
            return None
        kind, rest = value[:1], value[1:]
        if kind == b"t":
            return rest.decode()
        return str(UUID(bytes=rest)) if kind == b"u" else rest.hex()


class Sampling(TypeDecorator[dict[str, object]]):
    """Sampling parameters: JSON, compressed with a dictionary of what nearly all of them say, to a third."""

    impl = LargeBinary
    cache_ok = True
    # As it is for good: what was written with it is read with it.
    known = (
        b'"stop_token_ids": ["logit_bias": {"seed": 1, "n": 1, "stop": ["frequency_penalty": 0.0, '
        b'"presence_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0, "top_k": -1, "min_p": 0.0, '
        b'"max_tokens": 1024}{"temperature": 0.7}{"temperature": 1.0, "top_p": 1.0, "max_completion_tokens": 256}'
    )

    def process_bind_param(self, value: dict[str, object] | None, dialect: Dialect) -> bytes:
        """To the database."""
        packer = zlib.compressobj(wbits=-15, zdict=self.known)
        return packer.compress(json.dumps(value).encode()) + packer.flush()

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> dict[str, object]:
        """From the database."""
        assert value is not None
        parameters: dict[str, object] = json.loads(zlib.decompressobj(wbits=-15, zdict=self.known).decompress(value))
        return parameters


metadata = MetaData()

policies = Table(
    "policies",
    metadata,
    Column("name", String, primary_key=True),
    Column("rank", Integer, nullable=False),
    Column("alpha", Float, nullable=False),
    # NULL: every layer that the engine serves.
    Column("targets", JSON(none_as_null=True)),
    Column("seed", Integer, nullable=False),
    # NULL only until a server opens the database.
    Column("base_model", String),
    # What the plain name means now, and the highest number ever given out; they differ after a roll-back.
    Column("serving_version", Integer, nullable=False),
    Column("latest_version", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
)

versions = Table(
    "versions",
    metadata,
    Column("policy", String, primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("parent", Integer),
    Column("job_id", String),
    # Relative to the data directory; NULL for version 0, which is the base model itself.
    Column("directory", String),
    Column("loaded", Boolean, nullable=False),
    Column("created_at", Float, nullable=False),
    ForeignKeyConstraint(["policy"], ["policies.name"]),
)

pins = Table(
    "pins",
    metadata,
    # A group's id, or a run's where it has no group.
    Column("pin", Identifier, primary_key=True),
    Column("policy", String, primary_key=True),
    Column("version", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
)

prompts = Table(
    "prompts",
    metadata,
    Column("id", Integer, primary_key=True),
    # The prompt that it shares a beginning with, and how many tokens.
    Column("base", Integer, ForeignKey("prompts.id"), index=True),
    Column("shared", Integer, nullable=False),
    # The tokens after that, packed.
    Column("tail", LargeBinary, nullable=False),
)

calls = Table(
    "calls",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("call_id", Identifier, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("choice", Integer, nullable=False),
    Column("run_id", Identifier, index=True),
    Column("node", String),
    Column("model", String, nullable=False),
    Column("policy", String),
    Column("version", Integer),
    Column("status", String, nullable=False),
    Column("finish_reason", String),
    Column("sampling", Sampling, nullable=False),
    Column("constrained", Boolean, nullable=False),
    Column("untrainable", String),
    Column("created_at", Float, nullable=False),
    Column("prompt", Integer, ForeignKey("prompts.id"), nullable=False, index=True),
    # Packed like the tail of a prompt.
    Column("sampled_ids", LargeBinary, nullable=False),
    # Little-endian float32 array.
    Column("logprobs", LargeBinary, nullable=False),
    UniqueConstraint("call_id", "attempt", "choice"),
)

claims = Table(
    "claims",
    metadata,
    # A run that was submitted, or a call that was sent to be learned from: its tokens are kept.
    Column("id", Identifier, primary_key=True),
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", String, primary_key=True),
    # Order of acceptance, which is the order of training.
    Column("sequence", Integer, nullable=False, unique=True),
    # What the body is: "train", a Submission, or "sft", an SftSubmission.
    Column("kind", String, nullable=False, server_default="train"),
    Column("idempotency_key", String, nullable=False, unique=True),
    Column("body_sha256", String, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("state", String, nullable=False, index=True),
    # A job that kills its worker again and again must end.
    Column("worker_deaths", Integer, nullable=False),
    # The packing plan: decided before the first forward pass, so that a retry computes the same packs.
    Column("token_budget", Integer),
    Column("checkpointing", Boolean),
    Column("result", JSON),
    Column("error", String),
    Column("created_at", Float, nullable=False),
)

trained_runs = Table(
    "trained_runs",
    metadata,
    Column("run_id", String, primary_key=True),
    Column("policy", String, primary_key=True),
    Column("version", Integer, nullable=False),
)
