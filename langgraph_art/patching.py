"""Methods of other packages' classes that are ours for a while.

Invariant: they are replaced when the first needs it and put back when the last is done, so nothing stays behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any


class Patch:
    """A context manager that may be entered any number of times at once, in any threads.

    Args:
        owner: the class.
        wrappers: by method name, a function that gets the method and returns what stands in its place.
    """

    def __init__(self, owner: type, wrappers: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]) -> None:
        self._owner = owner
        self._wrappers = wrappers
        self._own: dict[str, Any] = {}  # what the class itself had; None: inherited
        self._users = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            for name, wrap in self._wrappers.items():
                self._own[name] = self._owner.__dict__.get(name)
                setattr(self._owner, name, wrap(getattr(self._owner, name)))

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            for name, method in self._own.items():
                if method is None:
                    delattr(self._owner, name)
                else:
                    setattr(self._owner, name, method)
