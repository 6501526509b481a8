"""Prompts share their beginnings on disk, come back whole, and leave nothing behind."""

from __future__ import annotations

import itertools
import sqlite3
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from langgraph_art.protocol import RecordedCall
from langgraph_art_server.storage.calls import CallStore
from langgraph_art_server.storage.database import Database
from langgraph_art_server.storage.prompts import PromptWriter, pack, unpack

from .records import recorded


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "server.db")


def stored(database: Database) -> dict[int, list[int]]:
    """The tokens that each prompt has of its own."""
    with database.read() as connection:
        return {row[0]: unpack(row[1]).tolist() for row in connection.exec_driver_sql("SELECT id, tail FROM prompts")}


def distinct(calls: list[RecordedCall]) -> int:
    """Tokens of a trie of all prompts."""
    return len({tuple(call.prompt_ids[: end + 1]) for call in calls for end in range(len(call.prompt_ids))})


@pytest.mark.parametrize(("largest", "width"), [(0, 2), (65_535, 2), (65_536, 3), (2**24 - 1, 3), (2**24, 4)])
def test_ids_take_the_bytes_they_need(largest: int, width: int) -> None:
    ids = [largest, 0, 1]
    assert len(pack(ids)) == 1 + 3 * width
    assert unpack(pack(ids)).tolist() == ids
    assert unpack(pack([])).tolist() == []


def test_runs_of_one_input_store_their_prompt_once(database: Database) -> None:
    store = CallStore(database)
    calls = [recorded(f"c{n}", run_id=f"r{n}", prompt_ids=list(range(100))) for n in range(8)]
    for call in calls:
        store.save([call])
    assert list(map(len, stored(database).values())) == [100]
    assert [store.of_run(f"r{n}") for n in range(8)] == [[call] for call in calls]


def test_the_choices_of_one_call_store_their_prompt_once(database: Database) -> None:
    store = CallStore(database)
    store.save([recorded(choice=choice) for choice in range(3)])
    assert len(stored(database)) == 1


def test_histories_store_what_each_turn_adds(database: Database) -> None:
    fresh = itertools.count(1000)
    store, calls = CallStore(database), []
    histories = [list(range(37)) for _ in range(4)]
    for turn in range(6):
        for run, history in enumerate(histories):
            if turn:
                history += [next(fresh) for _ in range(23)]
            calls.append(recorded(f"c{turn}-{run}", run_id=f"r{run}", prompt_ids=list(history)))
            store.save(calls[-1:])
    assert sum(map(len, stored(database).values())) == distinct(calls) == 37 + 4 * 5 * 23
    assert [call for run in range(4) for call in store.of_run(f"r{run}")] == sorted(calls, key=lambda c: c.run_id or "")


def test_chains_are_as_long_as_the_branches_are_deep(database: Database) -> None:
    """Prompts that all leave the first one at the same place do not hang on one another."""
    store = CallStore(database)
    for number in range(10):
        store.save([recorded(f"c{number}", prompt_ids=[*range(40), 100 + number, *range(20)])])
    with database.read() as connection:
        bases = set(connection.exec_driver_sql("SELECT base FROM prompts").scalars())
    assert bases == {None, 1}


def test_a_replaced_record_leaves_no_prompt(database: Database) -> None:
    store = CallStore(database)
    store.save([recorded(prompt_ids=[1, 2, 3])])
    store.save([recorded(prompt_ids=[4, 5])])
    assert list(stored(database).values()) == [[4, 5]]


def test_a_rolled_back_prompt_is_not_shared(database: Database) -> None:
    store, long = CallStore(database), list(range(50))
    wrong = recorded("c2").model_copy(update={"model": None})
    with pytest.raises(Exception, match="NOT NULL"):
        store.save([recorded(prompt_ids=long), wrong])
    assert store.of_run("r1") == []
    store.save([recorded(prompt_ids=[*long, 7])])
    assert store.of_run("r1")[0].prompt_ids == [*long, 7]


class Reopened:
    """A call store beside the calls that should be in it; every new token is another one."""

    def __init__(self, directory: Path) -> None:
        self.database = Database(directory / "server.db")
        self.fresh = itertools.count(1)
        self.calls: dict[str, RecordedCall] = {}
        self.open()

    def open(self) -> None:
        self.store = CallStore(self.database)
        self.store._prompts = PromptWriter(capacity=200)

    def clear(self) -> None:
        for run in ("r0", "r1", "r2"):
            self.store.delete_run(run)
        self.calls.clear()
        self.open()

    def check(self) -> None:
        found = self.store.of_ids(list(self.calls))
        assert found == {call_id: [call] for call_id, call in self.calls.items()}
        wanted = {token for call in self.calls.values() for token in call.prompt_ids}
        kept = [token for tail in stored(self.database).values() for token in tail]
        assert set(kept) == wanted, "no token of a call that is gone"
        with sqlite3.connect(str(self.database._normal.url.database)) as connection:
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []


@pytest.fixture(scope="module")
def reopened(tmp_path_factory: pytest.TempPathFactory) -> Reopened:
    return Reopened(tmp_path_factory.mktemp("prompts"))


saves = st.tuples(
    st.integers(0, 9),  # which call: a second time it replaces the first
    st.integers(0, 2),  # of which run
    st.integers(0, 9),  # begins like which call
    st.integers(0, 90),  # for how many tokens
    st.integers(0, 40),  # and goes on with how many of its own
)
steps = st.lists(saves | st.sampled_from(["r0", "r1", "r2", "reopen"]), max_size=14)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=steps)
def test_any_prompts_come_back_and_deleted_ones_are_gone(reopened: Reopened, steps: list[object]) -> None:
    reopened.clear()
    for step in steps:
        if step == "reopen":
            reopened.open()
        elif isinstance(step, str):
            reopened.store.delete_run(step)
            reopened.calls = {key: call for key, call in reopened.calls.items() if call.run_id != step}
        else:
            number, run, other, length, more = step  # type: ignore[misc]
            begin = reopened.calls[f"c{other}"].prompt_ids[:length] if f"c{other}" in reopened.calls else []
            ids = [*begin, *itertools.islice(reopened.fresh, more)]
            call = recorded(f"c{number}", run_id=f"r{run}", prompt_ids=ids)
            reopened.store.save([call])
            reopened.calls[call.call_id] = call
    reopened.check()
