"""What the call store takes on disk: bytes per distinct prompt token, per sampled token and per call.

    python benchmarks/call_store.py [--groups 40]

Three shapes: groups of 8 runs with one common prompt of 512 tokens and 64 sampled; groups of 4 runs with 6 calls each,
where a prompt is the one before, its answer and 64 new tokens; and short chats of many users under one system prompt.
Ids need 3 bytes (a vocabulary of 152k). A distinct prompt token is a node of the trie of all prompts; the metadata of a
call is all that the file has grown by, indexes and half-empty pages included, without the token columns.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import describe
from langgraph_art.protocol import RecordedCall
from langgraph_art_server.storage.calls import CallStore
from langgraph_art_server.storage.database import Database

VOCABULARY = 152_000
RANDOM = random.Random(0)
SUM = (
    "SELECT (SELECT sum(length(tail)) FROM prompts), "
    "(SELECT sum(length(sampled_ids) + length(logprobs)) FROM calls), (SELECT count(*) FROM prompts)"
)


def main(groups: Annotated[int, typer.Option(help="Groups of each shape; 25 times as many chats.")] = 40) -> None:
    """Fill a store with each shape and look at its file."""
    shapes = {name: measure(list(shape(groups))) for name, shape in SHAPES.items()}
    worst = {
        name: max(shape[name] for shape in shapes.values())
        for name in ("bytes_per_prompt_token", "bytes_per_sampled_token", "metadata_bytes_per_call")
    }
    print(json.dumps({"machine": describe(), "groups": groups, "shapes": shapes, **worst}))


def common_prompt(groups: int) -> Iterator[RecordedCall]:
    """Groups of 8 runs of one call: a prompt of 512 tokens, 64 sampled."""
    for _ in range(groups):
        prompt = _tokens(512)
        for _ in range(8):
            yield _call(str(uuid.uuid4()), prompt, 64)


def growing_history(groups: int) -> Iterator[RecordedCall]:
    """Groups of 4 runs of 6 calls, each with all that came before; the runs take turns."""
    for _ in range(groups):
        start = _tokens(512)
        histories = {str(uuid.uuid4()): list(start) for _ in range(4)}
        for _ in range(6):
            for run_id, history in histories.items():
                call = _call(run_id, history, 64)
                yield call
                history += call.sampled_ids + _tokens(64)


def short_chats(groups: int) -> Iterator[RecordedCall]:
    """Calls outside any run: a system prompt of 40 tokens, a question of 30, an answer of 25."""
    system = _tokens(40)
    for _ in range(25 * groups):
        yield _call(None, system + _tokens(30), 25)


SHAPES: dict[str, Callable[[int], Iterator[RecordedCall]]] = {
    "common_prompt": common_prompt,
    "growing_history": growing_history,
    "short_chats": short_chats,
}


def measure(calls: list[RecordedCall]) -> dict[str, float]:
    """Save calls one by one, read them, and look at the file."""
    with tempfile.TemporaryDirectory() as directory:
        database = Database(Path(directory) / "server.db")
        empty = database.size()
        store = CallStore(database)
        begun = time.process_time()
        for call in calls:
            store.save([call])
        saved = time.process_time()
        assert sum(map(len, store.of_ids([call.call_id for call in calls]).values())) == len(calls)
        read = time.process_time()
        with database.read() as connection:
            prompts, sampled, rows = connection.exec_driver_sql(SUM).one()
        grown = database.size() - empty
        database.close()
    prefixes = {hash_ for call in calls for hash_ in _prefixes(call.prompt_ids)}
    return {
        "calls": len(calls),
        "prompts": rows,
        "distinct_prompt_tokens": len(prefixes),
        "bytes_per_prompt_token": round(prompts / len(prefixes), 3),
        "bytes_per_sampled_token": round(sampled / sum(len(call.sampled_ids) for call in calls), 3),
        "metadata_bytes_per_call": round((grown - prompts - sampled) / len(calls), 1),
        "file_bytes_per_call": round(grown / len(calls), 1),
        "unshared_token_bytes_per_call": round(
            sum(4 * len(call.prompt_ids) + 8 * len(call.sampled_ids) for call in calls) / len(calls), 1
        ),
        "save_cpu_ms": round(1e3 * (saved - begun) / len(calls), 3),
        "read_cpu_ms": round(1e3 * (read - saved) / len(calls), 3),
    }


def _prefixes(ids: list[int]) -> Iterator[int]:
    prefix = 0
    for token in ids:
        prefix = hash((prefix, token))
        yield prefix


def _tokens(count: int) -> list[int]:
    return [RANDOM.randrange(VOCABULARY) for _ in range(count)]


def _call(run_id: str | None, prompt: list[int], sampled: int) -> RecordedCall:
    return RecordedCall(
        call_id=str(uuid.uuid4()) if run_id else uuid.uuid4().hex,
        attempt=0,
        choice=0,
        run_id=run_id,
        node="supervisor|researcher" if run_id else None,
        model="researcher",
        policy="researcher",
        version=12,
        status="complete",
        finish_reason="stop",
        sampling={"temperature": 1.0, "top_p": 1.0, "max_completion_tokens": 256},
        constrained=False,
        untrainable=None,
        prompt_ids=list(prompt),
        sampled_ids=_tokens(sampled),
        logprobs=[-RANDOM.random() for _ in range(sampled)],
        created_at=datetime.now(UTC),
    )


if __name__ == "__main__":
    typer.run(main)
