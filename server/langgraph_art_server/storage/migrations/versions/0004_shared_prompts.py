"""Prompts are stored apart from calls, to be shared; UUIDs take half the bytes; claims are written down."""

import json
import zlib
from collections.abc import Iterable, Iterator
from typing import Any
from uuid import UUID

import numpy as np
import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_SAME = (
    "attempt, choice, node, model, policy, version, status, finish_reason, constrained, untrainable, "
    "logprobs, created_at"
)
# What most sampling parameters say.
_KNOWN = (
    b'"stop_token_ids": ["logit_bias": {"seed": 1, "n": 1, "stop": ["frequency_penalty": 0.0, '
    b'"presence_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0, "top_k": -1, "min_p": 0.0, '
    b'"max_tokens": 1024}{"temperature": 0.7}{"temperature": 1.0, "top_p": 1.0, "max_completion_tokens": 256}'
)


def upgrade() -> None:
    """Move calls and pins over; each call of before keeps a prompt of its own."""
    with op.batch_alter_table("calls") as batch_op:
        batch_op.drop_index(batch_op.f("ix_calls_run_id"))
    op.rename_table("calls", "old_calls")
    op.rename_table("pins", "old_pins")
    op.create_table(
        "prompts",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("base", sa.Integer(), nullable=True),
        sa.Column("shared", sa.Integer(), nullable=False),
        sa.Column("tail", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["base"], ["prompts.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_prompts_base", "prompts", ["base"])
    op.create_table(
        "calls",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("call_id", sa.LargeBinary(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("choice", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.LargeBinary(), nullable=True),
        sa.Column("node", sa.String(), nullable=True),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("policy", sa.String(), nullable=True),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("finish_reason", sa.String(), nullable=True),
        sa.Column("sampling", sa.LargeBinary(), nullable=False),
        sa.Column("constrained", sa.Boolean(), nullable=False),
        sa.Column("untrainable", sa.String(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("prompt", sa.Integer(), nullable=False),
        sa.Column("sampled_ids", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["prompt"], ["prompts.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("call_id", "attempt", "choice"),
    )
    op.create_index("ix_calls_run_id", "calls", ["run_id"])
    op.create_index("ix_calls_prompt", "calls", ["prompt"])
    op.create_table(
        "pins",
        sa.Column("pin", sa.LargeBinary(), nullable=False),
        sa.Column("policy", sa.String(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("pin", "policy"),
    )
    op.create_table("claims", sa.Column("id", sa.LargeBinary(), nullable=False), sa.PrimaryKeyConstraint("id"))
    _write("prompts", "id, shared, tail", ((row.rowid, 0, b"\4" + row.prompt_ids) for row in _rows("old_calls")))
    _write(
        "calls",
        f"{_SAME}, id, call_id, run_id, sampling, prompt, sampled_ids",
        (
            (
                *_same(row),
                row.rowid,
                _packed(row.call_id),
                _packed(row.run_id),
                _deflated(row.sampling),
                row.rowid,
                b"\4" + row.sampled_ids,
            )
            for row in _rows("old_calls")
        ),
    )
    _write(
        "pins",
        "pin, policy, version, created_at",
        ((_packed(row.pin), row.policy, row.version, row.created_at) for row in _rows("old_pins")),
    )
    _write("claims", "id", {(_packed(claimed),) for row in _rows("jobs") for claimed in _claimed(row.body)})
    op.drop_table("old_calls")
    op.drop_table("old_pins")


def downgrade() -> None:
    """Write every call's prompt out again."""
    with op.batch_alter_table("calls") as batch_op:
        batch_op.drop_index("ix_calls_run_id")
        batch_op.drop_index("ix_calls_prompt")
    op.rename_table("calls", "new_calls")
    op.rename_table("pins", "new_pins")
    op.create_table(
        "calls",
        sa.Column("call_id", sa.String(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("choice", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(), nullable=True),
        sa.Column("node", sa.String(), nullable=True),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("policy", sa.String(), nullable=True),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("finish_reason", sa.String(), nullable=True),
        sa.Column("sampling", sa.JSON(), nullable=False),
        sa.Column("constrained", sa.Boolean(), nullable=False),
        sa.Column("untrainable", sa.String(), nullable=True),
        sa.Column("prompt_ids", sa.LargeBinary(), nullable=False),
        sa.Column("sampled_ids", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("call_id", "attempt", "choice"),
    )
    op.create_index("ix_calls_run_id", "calls", ["run_id"])
    op.create_table(
        "pins",
        sa.Column("pin", sa.String(), nullable=False),
        sa.Column("policy", sa.String(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("pin", "policy"),
    )
    whole: dict[int, bytes] = {}
    for row in _rows("prompts"):
        start = b"" if row.base is None else whole[row.base][: 4 * row.shared]
        whole[row.id] = start + _wide(row.tail)
    _write(
        "calls",
        f"{_SAME}, call_id, run_id, sampling, prompt_ids, sampled_ids",
        (
            (
                *_same(row),
                _text(row.call_id),
                _text(row.run_id),
                zlib.decompressobj(wbits=-15, zdict=_KNOWN).decompress(row.sampling).decode(),
                whole[row.prompt],
                _wide(row.sampled_ids),
            )
            for row in _rows("new_calls")
        ),
    )
    _write(
        "pins",
        "pin, policy, version, created_at",
        ((_text(row.pin), row.policy, row.version, row.created_at) for row in _rows("new_pins")),
    )
    for table in ("new_calls", "new_pins", "claims", "prompts"):
        op.drop_table(table)


def _rows(table: str) -> Iterator[Any]:
    """All rows in the order in which they came, a few at a time."""
    connection, last = op.get_bind(), 0
    query = sa.text(f"SELECT rowid AS rowid, * FROM {table} WHERE rowid > :last ORDER BY rowid LIMIT 500")
    while rows := connection.execute(query, {"last": last}).all():
        yield from rows
        last = rows[-1].rowid


def _write(table: str, columns: str, rows: Iterable[tuple[Any, ...]]) -> None:
    names = columns.split(", ")
    statement = sa.text(f"INSERT INTO {table} ({columns}) VALUES ({', '.join(f':{name}' for name in names)})")
    for row in rows:
        op.get_bind().execute(statement, dict(zip(names, row, strict=True)))


def _same(row: Any) -> Iterator[Any]:
    return (getattr(row, name) for name in _SAME.split(", "))


def _claimed(body: bytes) -> set[str]:
    submission = json.loads(zlib.decompress(body))
    runs = {run["run_id"] for group in submission.get("groups", []) for run in group["runs"]}
    return runs | {example["call_id"] for example in submission.get("examples", []) if "call_id" in example}


def _packed(text: str | None) -> bytes | None:
    if text is None:
        return None
    try:
        uuid = UUID(text)
    except ValueError:
        return b"t" + text.encode()
    known = {str(uuid): b"u", uuid.hex: b"h"}
    return known[text] + uuid.bytes if text in known else b"t" + text.encode()


def _text(packed: bytes | None) -> str | None:
    if packed is None:
        return None
    kind, rest = packed[:1], packed[1:]
    if kind == b"t":
        return rest.decode()
    return str(UUID(bytes=rest)) if kind == b"u" else rest.hex()


def _deflated(text: str) -> bytes:
    packer = zlib.compressobj(wbits=-15, zdict=_KNOWN)
    return packer.compress(text.encode()) + packer.flush()


def _wide(packed: bytes) -> bytes:
    """Packed token ids in four bytes each."""
    narrow = np.frombuffer(packed, np.uint8, offset=1).reshape(-1, packed[0])
    wide = np.zeros((len(narrow), 4), np.uint8)
    wide[:, : packed[0]] = narrow
    return wide.tobytes()
