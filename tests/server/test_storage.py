"""The database: schema, durability, and what each store promises."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from sqlalchemy import update

from langgraph_art.protocol import (
    ChatExample,
    CreatePolicy,
    GroupSubmission,
    LoraConfig,
    RecordedExample,
    RunSubmission,
    SftSubmission,
    Submission,
    TrainResult,
)
from langgraph_art_server.errors import BadRequest, Conflict, NotFound
from langgraph_art_server.lora_targets import SERVED_LINEARS, served_linears
from langgraph_art_server.storage.calls import CallStore
from langgraph_art_server.storage.database import Database
from langgraph_art_server.storage.jobs import JobStore, NewVersion, PackingPlan
from langgraph_art_server.storage.policies import PolicyStore
from langgraph_art_server.storage.retention import expire_unclaimed
from langgraph_art_server.storage.schema import metadata, policies

from .records import recorded
from .rooms import eventually

RESULT = TrainResult(updates=[], skipped={"call:stale_version": 1}, seconds={"train": 1.0})


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "server.db")


def policy_store(database: Database, base_model: str = "tiny") -> PolicyStore:
    return PolicyStore(database, base_model=base_model, max_rank=16, linears=SERVED_LINEARS)


def submission(key: str = "k1", reward: float = 1.0) -> Submission:
    run = RunSubmission(run_id="r1", reward=reward, calls=[])
    return Submission(idempotency_key=key, groups=[GroupSubmission(group_id="g1", runs=[run])])


def test_the_migrations_make_the_schema(database: Database) -> None:
    with database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_opening_again_changes_nothing(tmp_path: Path) -> None:
    CallStore(Database(tmp_path / "server.db")).save([recorded()])
    assert CallStore(Database(tmp_path / "server.db")).of_run("r1") == [recorded()]


ids = st.lists(st.integers(0, 300) | st.integers(0, 2**31 - 1), max_size=20)


@pytest.fixture(scope="module")
def one_store(tmp_path_factory: pytest.TempPathFactory) -> CallStore:
    return CallStore(Database(tmp_path_factory.mktemp("calls") / "server.db"))


@settings(max_examples=50, deadline=None)
@given(prompt=ids, sampled=ids, logprobs=st.lists(st.floats(-1e4, 0, width=32), max_size=20))
def test_tokens_come_back_exactly(
    one_store: CallStore, prompt: list[int], sampled: list[int], logprobs: list[float]
) -> None:
    store = one_store
    call = recorded(prompt_ids=prompt, sampled_ids=sampled, logprobs=logprobs)
    store.save([call])
    assert store.of_run("r1") == [call]
    assert store.of_ids(["c1", "unknown"]) == {"c1": [call]}


def test_calls_of_runs_are_found_by_id(database: Database) -> None:
    store = CallStore(database)
    store.save([recorded("a"), recorded("b", attempt=1), recorded("c", run_id="r2"), recorded("d", run_id=None)])
    assert store.ids_of_runs(["r1", "r9"]) == {"a", "b"}


def test_float32_is_what_the_engine_reports(database: Database) -> None:
    store = CallStore(database)
    store.save([recorded(logprobs=[-4.707749366760254, -0.0017614339012652636])])
    found = store.of_run("r1")[0].logprobs
    assert found == [float(np.float32(value)) for value in (-4.707749366760254, -0.0017614339012652636)]


def test_attempts_and_choices_are_records_of_their_own(database: Database) -> None:
    store = CallStore(database)
    calls = [recorded(attempt=attempt, choice=choice) for attempt in range(2) for choice in range(2)]
    store.save(calls)
    assert sorted(store.of_ids(["c1"])["c1"], key=lambda call: (call.attempt, call.choice)) == calls


@pytest.mark.parametrize(
    "call_id", [str(UUID(int=5)), UUID(int=5).hex, str(UUID(int=2**127)).upper(), "", "ä", "u" * 17]
)
def test_any_text_is_an_id(database: Database, call_id: str) -> None:
    store = CallStore(database)
    call = recorded(call_id, run_id=call_id)
    store.save([call])
    assert store.of_run(call_id) == [call]
    assert store.of_ids([call_id, str(UUID(int=6))]) == {call_id: [call]}


def test_calls_that_nobody_claims_expire(database: Database) -> None:
    store, jobs, policies = CallStore(database), JobStore(database), policy_store(database)
    policies.create(CreatePolicy(name="desk"))
    old, young = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 3, tzinfo=UTC)
    jobs.add(submission())  # of run r1
    examples = [RecordedExample(call_id="learned")]
    jobs.add(SftSubmission(idempotency_key="s1", policy="desk", examples=examples))
    kept = [
        recorded("submitted", created_at=old),
        recorded("learned", run_id="r2", created_at=old),
        recorded("goes on", run_id="r3", created_at=old),
        recorded("went on", run_id="r3", created_at=young),
        recorded("chat now", run_id=None, created_at=young),
    ]
    gone = [recorded("beside it", run_id="r2", created_at=old), recorded("chat", run_id=None, created_at=old)]
    store.save([*kept, *gone])
    before = store.info()
    assert (before.calls, before.unclaimed, before.expired) == (7, 5, 0)
    assert before.bytes > 0
    assert store.expire(datetime(2026, 1, 2, tzinfo=UTC)) == 2
    assert set(store.of_ids([call.call_id for call in [*kept, *gone]])) == {call.call_id for call in kept}
    after = store.info()
    assert (after.calls, after.unclaimed, after.expired) == (5, 3, 2)
    assert store.expire(datetime(2026, 1, 2, tzinfo=UTC)) == 0


def test_a_call_that_comes_after_its_submission_is_claimed(database: Database) -> None:
    store = CallStore(database)
    JobStore(database).add(submission())
    store.save([recorded()])
    assert (store.info().unclaimed, store.expire(datetime.now(UTC))) == (0, 0)
    assert store.of_run("r1") == [recorded()]


def test_a_deleted_run_is_no_longer_claimed(database: Database) -> None:
    store, jobs = CallStore(database), JobStore(database)
    job = jobs.add(submission())
    jobs.fail(job.id, "why")
    store.delete_run("r1")
    store.save([recorded()])
    assert store.info().unclaimed == 1
    jobs.add(submission())
    assert store.info().unclaimed == 0, "sent again, it is claimed again"


def test_pins_expire_unless_their_run_goes_on(database: Database) -> None:
    store, policies, jobs = CallStore(database), policy_store(database), JobStore(database)
    policies.create(CreatePolicy(name="desk"))
    for pin in ("r1", "r2", "g1"):
        policies.pin(pin, "desk")
    job = jobs.add(submission("k2"))
    jobs.commit(job.id, RESULT, [NewVersion("desk", 1, 0, "checkpoints/desk/1", [])])
    policies.mark_serving("desk", 1)
    store.expire(datetime(2026, 1, 1, tzinfo=UTC))
    assert policies.pin("g1", "desk") == 0, "it is young"
    later = datetime.now(UTC) + timedelta(hours=1)
    store.save([recorded(run_id="r2", created_at=later)])
    store.expire(later - timedelta(minutes=1))
    assert [policies.pin(pin, "desk") for pin in ("r1", "r2", "g1")] == [1, 0, 1]


async def test_the_server_lets_calls_expire(database: Database) -> None:
    store = CallStore(database)
    store.save([recorded("old"), recorded("new", run_id="r2", created_at=datetime.now(UTC))])
    task = asyncio.create_task(expire_unclaimed(store, timedelta(hours=1)))
    await eventually(lambda: store.info().calls == 1)
    task.cancel()
    assert list(store.of_ids(["old", "new"])) == ["new"]


WRITER = """
import sys
from pathlib import Path
from langgraph_art_server.storage.calls import CallStore
from langgraph_art_server.storage.database import Database
from tests.server.records import recorded
store = CallStore(Database(Path(sys.argv[1])))
for number in range(100_000):
    store.save([recorded(f"c{number}")])
    print(number, flush=True)
"""


def test_a_saved_call_survives_kill_9(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "server.db")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert writer.stdout is not None
    for line in writer.stdout:
        if int(line) >= 30:
            break
    writer.send_signal(signal.SIGKILL)
    acknowledged = [int(line), *(int(more) for more in writer.stdout if more.endswith("\n"))]
    writer.wait()
    found = CallStore(Database(tmp_path / "server.db")).of_run("r1")
    assert {f"c{number}" for number in range(max(acknowledged) + 1)} <= {call.call_id for call in found}


def test_creating_a_policy_twice_is_one_policy(database: Database) -> None:
    store = policy_store(database)
    first = store.create(CreatePolicy(name="desk"))
    assert store.create(CreatePolicy(name="desk")) == first
    assert (first.version, [version.version for version in first.versions]) == (0, [0])


def test_the_shape_of_a_policy_is_fixed(database: Database) -> None:
    store = policy_store(database)
    store.create(CreatePolicy(name="desk"))
    with pytest.raises(Conflict, match="rank=8"):
        store.create(CreatePolicy(name="desk", lora=LoraConfig(rank=8)))


def test_a_policy_that_could_never_be_served_is_refused(database: Database) -> None:
    store = policy_store(database)
    with pytest.raises(BadRequest, match=r"'tiny'.*another one"):
        store.create(CreatePolicy(name="tiny"))
    with pytest.raises(BadRequest, match="--max-lora-rank"):
        store.create(CreatePolicy(name="big", lora=LoraConfig(rank=17)))
    with pytest.raises(BadRequest, match=r"'wide': adapters on embed_tokens, lm_head cannot be served.*q_proj"):
        store.create(CreatePolicy(name="wide", lora=LoraConfig(targets=["q_proj", "lm_head", "embed_tokens"])))
    assert store.names() == []


def test_the_targets_of_a_policy_are_a_set_that_is_kept(database: Database) -> None:
    store = policy_store(database)
    store.create(CreatePolicy(name="desk", lora=LoraConfig(targets=["v_proj", "q_proj", "v_proj"])))
    assert store.head("desk").lora.targets == store.get("desk").lora.targets == ["q_proj", "v_proj"]
    store.create(CreatePolicy(name="desk", lora=LoraConfig(targets=["v_proj", "q_proj"])))
    with pytest.raises(Conflict, match="targets"):
        store.create(CreatePolicy(name="desk"))


def test_the_layers_of_a_model_are_read_from_its_files(tmp_path: Path) -> None:
    assert served_linears(tmp_path) == SERVED_LINEARS, "no file tells"
    for number, name in enumerate(["self_attn.qkv_proj.weight", "mlp.down_proj.qweight", "input_layernorm.weight"]):
        weight = {f"model.layers.0.{name}": np.zeros((2, 2), dtype=np.float32)}
        save_file(weight, tmp_path / f"model-{number}.safetensors", metadata={"format": "pt"})
    assert served_linears(tmp_path) == {"qkv_proj", "down_proj"}


def test_a_policy_of_another_base_model_is_not_known(database: Database) -> None:
    """Its calls, and the base that its version 0 stands for, are another model's."""
    ours, theirs = policy_store(database), policy_store(database, "large")
    ours.create(CreatePolicy(name="desk"))
    assert ours.pin("g1", "desk") == 0
    job = JobStore(database).add(submission())
    JobStore(database).commit(job.id, RESULT, [NewVersion("desk", 1, 0, "checkpoints/desk/1", ["r1"])])
    assert (theirs.names(), theirs.all(), theirs.serving_version("desk"), theirs.pin("g1", "desk")) == (
        [],
        [],
        None,
        None,
    )
    with pytest.raises(NotFound, match="desk"):
        theirs.directory("desk", 1)
    with pytest.raises(Conflict, match="'desk' belongs to the base model tiny, and this server serves large"):
        theirs.create(CreatePolicy(name="desk"))
    assert theirs.directories() == {"checkpoints/desk/1"}, "its checkpoints are no orphans"
    assert ours.directory("desk", 1) == "checkpoints/desk/1"


def test_policies_from_before_they_knew_their_base_model(database: Database) -> None:
    policy_store(database).create(CreatePolicy(name="desk"))
    with database.write() as connection:
        connection.execute(update(policies).values(base_model=None))
    assert policy_store(database).names() == ["desk"]
    assert policy_store(database, "large").names() == []


def test_a_failed_job_is_queued_again_by_the_same_submission(database: Database) -> None:
    jobs = JobStore(database)
    job = jobs.add(submission())
    jobs.worker_died(job.id)
    jobs.fail(job.id, "out of memory")
    again = jobs.add(submission())
    assert (again.id, again.state, again.error) == (job.id, "queued", None)
    assert jobs.worker_died(job.id) == 1
    with pytest.raises(Conflict):
        jobs.add(submission(reward=2.0))


MIGRATE_AND_DIE = """
import os, sys
from pathlib import Path
from sqlalchemy import event
from langgraph_art_server.storage import database
engine = database._engine(Path(sys.argv[1]), "FULL")
statements = 0
@event.listens_for(engine, "before_cursor_execute")
def count(connection, cursor, statement, *rest):
    global statements
    statements += statement.lstrip().upper().startswith("CREATE")
    if statements > int(sys.argv[2]):
        os.kill(os.getpid(), 9)
with engine.begin() as connection:
    database.migrate(connection)
"""


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 3, 5])
def test_a_migration_that_was_killed_starts_again(tmp_path: Path, after: int) -> None:
    path = tmp_path / "server.db"
    killed = subprocess.run([sys.executable, "-c", MIGRATE_AND_DIE, str(path), str(after)], check=False)
    assert killed.returncode == -signal.SIGKILL
    CallStore(Database(path)).save([recorded()])


def test_a_pin_stays_when_the_policy_moves(database: Database) -> None:
    policies, jobs = policy_store(database), JobStore(database)
    policies.create(CreatePolicy(name="desk"))
    assert policies.pin("g1", "desk") == 0
    job = jobs.add(submission())
    jobs.commit(job.id, RESULT, [NewVersion("desk", 1, 0, "checkpoints/desk/1", ["r1"])])
    assert policies.serving_version("desk") == 0, "a version serves only when it is loaded"
    policies.mark_serving("desk", 1)
    assert policies.pin("g1", "desk") == 0
    assert policies.pin("g2", "desk") == 1
    assert policies.pin("g3", "nobody") is None


def test_unknown_things_are_named(database: Database) -> None:
    policies = policy_store(database)
    policies.create(CreatePolicy(name="desk"))
    with pytest.raises(NotFound, match="'desk' has no version 7"):
        policies.directory("desk", 7)
    with pytest.raises(NotFound, match="'clerk'"):
        policies.get("clerk")
    with pytest.raises(NotFound, match="'j1'"):
        JobStore(database).get("j1")


def test_the_same_key_is_the_same_job(database: Database) -> None:
    jobs = JobStore(database)
    job = jobs.add(submission())
    assert jobs.add(submission()) == job
    assert jobs.submission(job.id) == submission()
    with pytest.raises(Conflict, match="idempotency key 'k1'"):
        jobs.add(submission(reward=2.0))


def test_jobs_are_worked_in_order_of_acceptance(database: Database) -> None:
    jobs = JobStore(database)
    first, second = jobs.add(submission("k1")), jobs.add(submission("k2"))
    assert jobs.next("queued") == first.id
    jobs.begin(first.id)
    assert [jobs.worker_died(first.id), jobs.worker_died(first.id)] == [1, 2]
    assert jobs.next("running", "queued") == first.id
    jobs.fail(first.id, "why")
    assert jobs.next("running", "queued") == second.id
    assert jobs.get(first.id).error == "why"


def test_a_commit_is_whole_or_nothing(database: Database) -> None:
    policies, jobs = policy_store(database), JobStore(database)
    for name in ("desk", "clerk"):
        policies.create(CreatePolicy(name=name))
    job = jobs.add(submission())
    new = [NewVersion("desk", 1, 0, "checkpoints/desk/1", ["r1"]), NewVersion("clerk", 0, 0, "taken", ["r1"])]
    with pytest.raises(Exception, match="UNIQUE"):
        jobs.commit(job.id, RESULT, new)
    assert jobs.get(job.id).state == "queued"
    assert policies.head("desk").latest == 0
    assert jobs.already_trained(["r1"]) == set()
    jobs.commit(job.id, RESULT, new[:1])
    assert jobs.get(job.id).state == "trained"
    assert policies.head("desk").latest == 1
    assert jobs.already_trained(["r1", "r2"]) == {("r1", "desk")}
    assert policies.directories() == {"checkpoints/desk/1"}


def test_the_packing_plan_stays_with_the_job_until_it_failed(database: Database) -> None:
    jobs = JobStore(database)
    job = jobs.add(submission())
    assert jobs.plan(job.id) is None
    for plan in (PackingPlan(1024, checkpointing=False), PackingPlan(512, checkpointing=True)):
        jobs.keep_plan(job.id, plan)
        assert jobs.plan(job.id) == plan
    jobs.worker_died(job.id)
    jobs.begin(job.id)
    assert JobStore(database).plan(job.id) == PackingPlan(512, checkpointing=True)
    jobs.fail(job.id, "out of memory")
    jobs.add(submission())
    assert jobs.plan(job.id) is None, "the plan may be why it failed"


def test_fine_tuning_is_a_job_of_its_own_kind(database: Database) -> None:
    policies, jobs = policy_store(database), JobStore(database)
    policies.create(CreatePolicy(name="desk"))
    examples = [RecordedExample(call_id="c1"), ChatExample(messages=[{"role": "assistant", "content": "hi"}])]
    body = SftSubmission(idempotency_key="s1", policy="desk", examples=examples)
    job = jobs.add(body)
    assert (job.kind, jobs.add(body), jobs.submission(job.id)) == ("sft", job, body)
    with pytest.raises(Conflict, match="idempotency key 's1'"):
        jobs.add(submission("s1"))
    assert jobs.add(submission("k1")).kind == "train"
    jobs.commit(job.id, RESULT, [NewVersion("desk", 1, 0, "checkpoints/desk/1", [])])
    assert policies.head("desk").latest == 1
    assert jobs.already_trained(["r1", ""]) == set()
