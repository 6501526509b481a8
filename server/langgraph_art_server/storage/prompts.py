"""Prompts on disk: each is the beginning of another prompt, followed by tokens of its own.

Invariant: what is read is what was written, token for token. A beginning is shared only where the ids themselves were
compared, and a prompt that no call refers to keeps no token but those that other prompts take from it. Which prompts
there are to share with is known in memory only: when that is lost, space is lost and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Select, delete, exists, func, insert, select, update

from langgraph_art_server.storage.schema import calls, prompts

Tokens = NDArray[np.uint32]

_BLOCK = 16
"""Tokens. Shorter common beginnings are not worth a reference."""


def pack(ids: Sequence[int] | Tokens) -> bytes:
    """Token ids in the 2, 3 or 4 bytes that the largest of them needs; the first byte says how many."""
    array = np.asarray(ids, dtype="<u4")
    largest = int(array.max(initial=0))
    width = 2 if largest < 1 << 16 else 3 if largest < 1 << 24 else 4
    return bytes([width]) + array.view(np.uint8).reshape(-1, 4)[:, :width].tobytes()


def unpack(packed: bytes) -> Tokens:
    """The token ids that :func:`pack` was given."""
    width = packed[0]
    narrow = np.frombuffer(packed, np.uint8, offset=1).reshape(-1, width)
    wide = np.zeros((len(narrow), 4), np.uint8)
    wide[:, :width] = narrow
    return wide.view("<u4").reshape(-1)


@dataclass(frozen=True)
class _Known:
    """A prompt on disk that others may begin with."""

    id: int
    base: int | None
    shared: int
    tokens: Tokens
    keys: list[int]


class PromptWriter:
    """Writes prompts, and knows the latest ones, to share their beginnings. Not thread-safe.

    Args:
        capacity: Tokens of prompts to know; they take some 12 bytes each in memory.
    """

    def __init__(self, capacity: int = 1 << 22) -> None:
        self._capacity = capacity
        self._size = 0
        self._known: OrderedDict[int, _Known] = OrderedDict()  # by id, the latest used last
        self._by_beginning: dict[int, _Known] = {}

    def write(self, connection: Connection, ids: Sequence[int]) -> int:
        """Store a prompt, unless it is there already; returns its id.

        If the transaction is rolled back, :meth:`forget_all` must follow.
        """
        tokens = np.asarray(ids, dtype="<u4")
        keys = _beginnings(tokens)
        nearest = next((self._by_beginning[key] for key in reversed(keys) if key in self._by_beginning), None)
        shared = 0 if nearest is None else _common(nearest.tokens, tokens)
        if nearest is not None and shared == len(tokens) == len(nearest.tokens):
            self._known.move_to_end(nearest.id)
            return nearest.id
        base = None
        if nearest is not None and shared >= _BLOCK:
            base = nearest.id
            # From the prompt that holds the last shared token itself, so that chains stay short.
            while nearest is not None and nearest.base is not None and shared <= nearest.shared:
                base = nearest.base
                nearest = self._known.get(base)
        shared = 0 if base is None else shared
        row = connection.execute(insert(prompts).values(base=base, shared=shared, tail=pack(tokens[shared:])))
        assert row.inserted_primary_key is not None
        self._learn(_Known(row.inserted_primary_key[0], base, shared, tokens, keys))
        return int(row.inserted_primary_key[0])

    def release(self, connection: Connection, candidates: Iterable[int]) -> None:
        """Take away what nothing needs any more of prompts that calls referred to.

        A prompt that no call refers to is cut to what other prompts take from it, and deleted if that is nothing.
        """
        left = sorted(set(candidates))
        while left:
            prompt = left.pop()
            row = connection.execute(select(prompts).where(prompts.c.id == prompt)).first()
            if row is None or connection.execute(select(exists().where(calls.c.prompt == prompt))).scalar_one():
                continue
            needed = connection.execute(select(func.max(prompts.c.shared)).where(prompts.c.base == prompt)).scalar()
            tail = unpack(row.tail)
            if needed is None:
                connection.execute(delete(prompts).where(prompts.c.id == prompt))
            elif needed < row.shared + len(tail):
                cut = {"shared": min(row.shared, needed), "tail": pack(tail[: max(needed - row.shared, 0)])}
                connection.execute(update(prompts).where(prompts.c.id == prompt).values(**cut))
            else:
                continue
            self._forget(prompt)
            if row.base is not None:
                left.append(row.base)

    def forget_all(self) -> None:
        """Share with nothing that was written up to now."""
        self._known.clear()
        self._by_beginning.clear()
        self._size = 0

    def _learn(self, known: _Known) -> None:
        self._known[known.id] = known
        self._by_beginning.update(dict.fromkeys(known.keys, known))
        self._size += len(known.tokens)
        while self._size > self._capacity:
            self._forget(next(iter(self._known)))

    def _forget(self, prompt: int) -> None:
        known = self._known.pop(prompt, None)
        if known is None:
            return
        self._size -= len(known.tokens)
        for key in known.keys:
            if self._by_beginning.get(key) is known:
                del self._by_beginning[key]


def read_prompts(connection: Connection, wanted: Select[int]) -> dict[int, list[int]]:
    """The token ids of prompts, by id.

    Args:
        connection: Where to read.
        wanted: Selects their ids.
    """
    needed = wanted.cte("needed", recursive=True)
    (prompt,) = needed.c
    needed = needed.union(select(prompts.c.base).where(prompts.c.id == prompt, prompts.c.base.is_not(None)))
    found: dict[int, Tokens] = {}
    # A prompt is younger than what it begins with, so its id is higher.
    rows = connection.execute(select(prompts).where(prompts.c.id.in_(select(*needed.c))).order_by(prompts.c.id))
    for row in rows:
        tail = unpack(row.tail)
        found[row.id] = tail if row.base is None else np.concatenate([found[row.base][: row.shared], tail])
    return {prompt: found[prompt].tolist() for prompt in connection.execute(wanted.distinct()).scalars()}


def _beginnings(tokens: Tokens) -> list[int]:
    """A key for each whole number of blocks that the tokens begin with, and one for all of them."""
    data, step = tokens.tobytes(), 4 * _BLOCK
    key, keys = 0, []
    for start in range(0, len(data) + 1, step):
        key = hash((key, data[start : start + step]))
        keys.append(key)
    return keys


def _common(one: Tokens, other: Tokens) -> int:
    """How many tokens both begin with."""
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    return int(different.argmax()) if different.any() else length
