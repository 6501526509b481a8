"""Equality of SQL results: a query is right if it returns what the right query returns.

Invariant: a query of a policy can change nothing and cannot run forever; if it fails, it is wrong. If the right query
fails, nothing can be said, and the run is marked.
"""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from langgraph_art.rewards.parts import Get, Part, answer_of, expected_of
from langgraph_art.rewards.scores import BadReward

_READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_LARGEST = 10_000_000  # bytes of one value


def sql_result(
    database: str | Path | Callable[[], Any],
    expected: Get,
    *,
    answer: Get | None = None,
    ordered: bool = False,
    seconds: float = 5.0,
    max_rows: int = 10_000,
) -> Part:
    """1.0 if the query in the answer returns the same rows as the expected one, else 0.0.

    Args:
        database: file of an SQLite database, opened for each run for reading only; or a function that opens a DB-API
            connection. Such a connection must be of a user who may only read and have a time limit of its own: DB-API
            has neither. It is rolled back and closed.
        expected: the right query: a key of the input, or a function of the run.
        answer: the query to check, as in `answer_of`.
        ordered: whether the order of rows counts. Else they are compared as multisets.
        seconds: time limit of each query, for SQLite files.
        max_rows: a query that returns more is wrong.

    Raises:
        BadReward: (from the callback) the expected query fails.
        ValueError: a limit is not positive.
    """
    if seconds <= 0 or max_rows < 1:
        raise ValueError(f"sql_result: limits must be positive, got seconds={seconds} and max_rows={max_rows}")

    def rows(query: str) -> list[tuple[Any, ...]]:
        with closing(database() if callable(database) else _open(Path(database), seconds)) as connection:
            cursor = connection.cursor()
            try:
                cursor.execute(query)
                found = [tuple(row) for row in cursor.fetchmany(max_rows + 1)]
            finally:
                connection.rollback()
        if len(found) > max_rows:
            raise ValueError(f"it returns more than {max_rows} rows")
        return found

    def reward(run: Any) -> float:
        if run.error is not None:
            return 0.0
        query, right = str(answer_of(run, answer)), str(expected_of(run, expected))
        try:
            wanted = rows(right)
        except Exception as error:
            raise BadReward(f"the expected query fails: {error}: {right!r}") from error
        try:
            found = rows(query)
        except Exception:
            return 0.0
        return float(found == wanted if ordered else Counter(map(repr, found)) == Counter(map(repr, wanted)))

    return reward


def _open(path: Path, seconds: float) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LARGEST)
    # Only reading: mode=ro alone would let a query attach another file and write there.
    connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _READS else sqlite3.SQLITE_DENY)
    deadline = time.monotonic() + seconds
    connection.set_progress_handler(lambda: int(time.monotonic() > deadline), 1000)
    return connection
