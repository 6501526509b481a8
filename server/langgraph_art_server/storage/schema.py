"""The tables, said once. A change here goes with a new migration; a test compares the two.

Invariant: the data directory can move, so directories are stored relative to it. Times are seconds since the epoch.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Float,
    ForeignKeyConstraint,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
)

metadata = MetaData()

policies = Table(
    "policies",
    metadata,
    Column("name", String, primary_key=True),
    Column("rank", Integer, nullable=False),
    Column("alpha", Float, nullable=False),
    Column("seed", Integer, nullable=False),
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
    Column("pin", String, primary_key=True),
    Column("policy", String, primary_key=True),
    Column("version", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
)

calls = Table(
    "calls",
    metadata,
    Column("call_id", String, primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("choice", Integer, primary_key=True),
    Column("run_id", String, index=True),
    Column("node", String),
    Column("model", String, nullable=False),
    Column("policy", String),
    Column("version", Integer),
    Column("status", String, nullable=False),
    Column("finish_reason", String),
    Column("sampling", JSON, nullable=False),
    Column("constrained", Boolean, nullable=False),
    Column("untrainable", String),
    # Little-endian int32, int32 and float32 arrays.
    Column("prompt_ids", LargeBinary, nullable=False),
    Column("sampled_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("created_at", Float, nullable=False),
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", String, primary_key=True),
    # Order of acceptance, which is the order of training.
    Column("sequence", Integer, nullable=False, unique=True),
    Column("idempotency_key", String, nullable=False, unique=True),
    Column("body_sha256", String, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("state", String, nullable=False, index=True),
    # A job that kills its worker again and again must end.
    Column("worker_deaths", Integer, nullable=False),
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
