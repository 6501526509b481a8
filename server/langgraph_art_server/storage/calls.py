"""The call store: what the engine saw and sampled, one row for each call, attempt and choice.

Invariant: a call is written once, before its answer ends (or when it is abandoned), and never changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
from sqlalchemy import RowMapping, insert, select

from langgraph_art.protocol import RecordedCall
from langgraph_art_server.storage.database import Database
from langgraph_art_server.storage.schema import calls

_BOUND_VALUES = 500  # SQLite limits how many a statement may have


class CallStore:
    """Reads and writes recorded calls."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def save(self, recorded: Iterable[RecordedCall]) -> None:
        """Store calls in one transaction. The same (call id, attempt, choice) twice replaces the first record."""
        rows = [_row(call) for call in recorded]
        if not rows:
            return
        with self._database.write() as connection:
            connection.execute(insert(calls).prefix_with("OR REPLACE"), rows)

    def of_run(self, run_id: str) -> list[RecordedCall]:
        """All records of a run, oldest first, retried attempts and unused choices included."""
        query = select(calls).where(calls.c.run_id == run_id).order_by(calls.c.created_at)
        with self._database.read() as connection:
            return [_call(row) for row in connection.execute(query).mappings()]

    def ids_of_runs(self, run_ids: Sequence[str]) -> set[str]:
        """Ids of all calls recorded for these runs."""
        found: set[str] = set()
        with self._database.read() as connection:
            for start in range(0, len(run_ids), _BOUND_VALUES):
                query = select(calls.c.call_id).where(calls.c.run_id.in_(run_ids[start : start + _BOUND_VALUES]))
                found.update(connection.execute(query).scalars())
        return found

    def of_ids(self, call_ids: Sequence[str]) -> dict[str, list[RecordedCall]]:
        """Records by call id; ids without a record are absent."""
        found: dict[str, list[RecordedCall]] = {}
        with self._database.read() as connection:
            for start in range(0, len(call_ids), _BOUND_VALUES):
                query = select(calls).where(calls.c.call_id.in_(call_ids[start : start + _BOUND_VALUES]))
                for row in connection.execute(query).mappings():
                    found.setdefault(row["call_id"], []).append(_call(row))
        return found


def _row(call: RecordedCall) -> dict[str, Any]:
    row = call.model_dump()
    row["created_at"] = call.created_at.timestamp()
    row["prompt_ids"] = np.asarray(call.prompt_ids, dtype="<i4").tobytes()
    row["sampled_ids"] = np.asarray(call.sampled_ids, dtype="<i4").tobytes()
    row["logprobs"] = np.asarray(call.logprobs, dtype="<f4").tobytes()
    return row


def _call(row: RowMapping) -> RecordedCall:
    return RecordedCall(
        **{
            **row,
            "created_at": datetime.fromtimestamp(row["created_at"], UTC),
            "prompt_ids": np.frombuffer(row["prompt_ids"], dtype="<i4").tolist(),
            "sampled_ids": np.frombuffer(row["sampled_ids"], dtype="<i4").tolist(),
            "logprobs": np.frombuffer(row["logprobs"], dtype="<f4").tolist(),
        }
    )
