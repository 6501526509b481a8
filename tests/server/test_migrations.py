"""A database of every earlier schema opens, with what was in it."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import zlib
from array import array
from contextlib import closing
from pathlib import Path
from uuid import UUID

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, select, text

from langgraph_art.protocol import GroupSubmission, RunSubmission, Submission
from langgraph_art_server.lora_targets import SERVED_LINEARS
from langgraph_art_server.storage import database as database_module
from langgraph_art_server.storage.calls import CallStore
from langgraph_art_server.storage.database import Database
from langgraph_art_server.storage.jobs import JobStore, PackingPlan
from langgraph_art_server.storage.policies import PolicyStore
from langgraph_art_server.storage.schema import metadata, pins

from .records import recorded

ARRAYS = {"prompt_ids": "i", "sampled_ids": "i", "logprobs": "f"}
SUBMISSION = Submission(
    idempotency_key="k1",
    groups=[GroupSubmission(group_id="g1", runs=[RunSubmission(run_id="r1", reward=1.0, calls=[])])],
)


def config() -> Config:
    made = Config()
    made.set_main_option("script_location", str(database_module.MIGRATIONS))
    return made


REVISIONS = [script.revision for script in ScriptDirectory.from_config(config()).walk_revisions()][::-1]


def make(path: Path, revision: str) -> None:
    """A database as the server of that revision left it: one policy, and one submission that waits."""
    engine = database_module._engine(path, "FULL")
    body = SUBMISSION.model_dump_json().encode()
    with engine.begin() as connection:
        options = config()
        options.attributes["connection"] = connection
        command.upgrade(options, revision)
        connection.execute(
            text(
                "INSERT INTO policies (name, rank, alpha, seed, serving_version, latest_version, created_at) "
                "VALUES ('desk', 8, 16.0, 3, 0, 0, 1.0)"
            )
        )
        connection.execute(
            text("INSERT INTO versions (policy, version, loaded, created_at) VALUES ('desk', 0, 1, 1.0)")
        )
        connection.execute(
            text(
                "INSERT INTO jobs (id, sequence, idempotency_key, body_sha256, body, state, worker_deaths, created_at) "
                "VALUES ('j1', 1, 'k1', :digest, :body, 'running', 1, 1.0)"
            ),
            {"digest": hashlib.sha256(body).hexdigest(), "body": zlib.compress(body)},
        )
    engine.dispose()


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_database_of_an_earlier_schema_opens(tmp_path: Path, revision: str) -> None:
    make(tmp_path / "server.db", revision)
    database = Database(tmp_path / "server.db")
    with database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    jobs = JobStore(database)
    assert jobs.next("running") == "j1"
    assert (jobs.get("j1").kind, jobs.plan("j1")) == ("train", None)
    assert jobs.submission("j1") == SUBMISSION
    jobs.keep_plan("j1", PackingPlan(512, checkpointing=True))
    assert jobs.plan("j1") == PackingPlan(512, checkpointing=True)
    assert jobs.add(SUBMISSION).id == "j1"
    policy = PolicyStore(database, base_model="tiny", max_rank=16, linears=SERVED_LINEARS).get("desk")
    assert (policy.version, policy.lora.rank, policy.lora.targets) == (0, 8, None)


def test_every_migration_can_be_taken_back(tmp_path: Path) -> None:
    make(tmp_path / "server.db", "head")
    engine = create_engine(f"sqlite:///{tmp_path / 'server.db'}")  # tables are copied, so no foreign keys meanwhile
    for revision in [*REVISIONS[::-1][1:], "base"]:
        with engine.begin() as connection:
            options = config()
            options.attributes["connection"] = connection
            command.downgrade(options, revision)
    engine.dispose()


CALLS_BEFORE = [
    recorded(str(UUID(int=number)), run_id=run_id, choice=number % 2, prompt_ids=ids, node=None, finish_reason=None)
    for number, (run_id, ids) in enumerate([("r1", [1, 70_000]), (UUID(int=9).hex, []), (None, [1, 70_000, 2**31 - 1])])
]


def test_calls_and_pins_of_before_prompts_were_shared_stay(tmp_path: Path) -> None:
    path = tmp_path / "server.db"
    make(path, "0003")
    with closing(sqlite3.connect(path)) as connection:
        for call in CALLS_BEFORE:
            row = call.model_dump() | {"created_at": call.created_at.timestamp(), "sampling": json.dumps(call.sampling)}
            row |= {name: array(code, row[name]).tobytes() for name, code in ARRAYS.items()}
            marks = ", ".join(f":{name}" for name in row)
            connection.execute(f"INSERT INTO calls ({', '.join(row)}) VALUES ({marks})", row)
        connection.execute("INSERT INTO pins VALUES ('g1', 'desk', 0, 1.0)")
        connection.commit()
        before = connection.execute("SELECT * FROM calls ORDER BY call_id").fetchall()

    database = Database(path)
    store = CallStore(database)
    assert store.of_ids([call.call_id for call in CALLS_BEFORE]) == {call.call_id: [call] for call in CALLS_BEFORE}
    assert store.of_run("r1") == CALLS_BEFORE[:1]
    assert store.info().unclaimed == 2, "r1 was submitted"
    with database.read() as connection:
        assert connection.execute(select(pins.c.pin, pins.c.version)).all() == [("g1", 0)]
    # Prompts that are shared by now are written out again.
    store.save([recorded("long", prompt_ids=list(range(20))), recorded("longer", prompt_ids=list(range(30)))])
    database.close()
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        options = config()
        options.attributes["connection"] = connection
        command.downgrade(options, "0003")
    engine.dispose()
    with closing(sqlite3.connect(path)) as connection:
        query = "SELECT prompt_ids FROM calls WHERE call_id = 'longer'"
        assert array("i", connection.execute(query).fetchone()[0]).tolist() == list(range(30))
        connection.execute("DELETE FROM calls WHERE call_id LIKE 'long%'")
        assert connection.execute("SELECT * FROM calls ORDER BY call_id").fetchall() == before
        assert connection.execute("SELECT * FROM pins").fetchall() == [("g1", "desk", 0, 1.0)]
