"""Any Python value as JSON and back: what makes graph inputs and states storable.

Invariant: ``from_plain(to_plain(x)) == x`` for JSON values, tuples, sets, bytes, non-finite floats, dicts with any
keys, and LangChain messages. Other objects become ``{"$type": "module.Class", "value": ...}``, plain data that stays
so when loaded: reading a file never imports or builds a class that the file names. So does what cannot be built again,
such as a message that was redacted beyond recognition or is of another LangChain.

JSON values and dicts with string keys stand for themselves; everything else is an object with ``$type``. A dict of the
user's that has a key ``$type`` is written as pairs, so that it cannot be mistaken for one.
"""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from langchain_core.messages import BaseMessage, messages_from_dict, messages_to_dict
from pydantic import BaseModel

_TYPE = "$type"


def to_plain(value: Any) -> Any:
    """The value as JSON data (finite numbers, strings, booleans, None, lists, dicts with string keys)."""
    return _plain(value, ())


def from_plain(value: Any) -> Any:
    """The value that `to_plain` turned into this JSON data; typed objects stay dicts with ``$type`` and ``value``."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    restore = _RESTORE.get(value[_TYPE]) if isinstance(value.get(_TYPE), str) else None
    if restore is not None:
        try:
            return restore(value["value"])
        except (ValueError, TypeError, LookupError):
            return _typed(value[_TYPE], from_plain(value["value"]))
    return {key: from_plain(item) for key, item in value.items()}


def _plain(value: Any, inside: tuple[int, ...]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else _typed("float", repr(value))
    if id(value) in inside:
        return _typed("cycle", None)
    inside = (*inside, id(value))
    if kind is list:
        return [_plain(item, inside) for item in value]
    if kind is dict:
        if _TYPE not in value and all(type(key) is str for key in value):
            return {key: _plain(item, inside) for key, item in value.items()}
        return _typed("dict", [[_plain(key, inside), _plain(item, inside)] for key, item in value.items()])
    if kind in (tuple, set, frozenset):
        return _typed(kind.__name__, [_plain(item, inside) for item in value])
    if kind is bytes:
        return _typed("bytes", base64.b64encode(value).decode())
    if isinstance(value, BaseMessage):
        (data,) = messages_to_dict([value])
        return _typed("message", _plain(data, inside))
    return _typed(f"{kind.__module__}.{kind.__qualname__}", _contents(value, inside))


def _contents(value: Any, inside: tuple[int, ...]) -> Any:
    """The parts of an object of some other type; at worst its text."""
    if isinstance(value, Enum):
        return _plain(value.value, inside)
    if isinstance(value, BaseModel):
        return _plain({**dict(value), **(value.model_extra or {})}, inside)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain({field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}, inside)
    if isinstance(value, Mapping):
        return _plain(dict(value), inside)
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, inside) for item in value]
    for base in (str, int, float):
        if isinstance(value, base):
            return _plain(base(value), inside)
    return str(value)


def _typed(name: str, value: Any) -> dict[str, Any]:
    return {_TYPE: name, "value": value}


def _message(data: Any) -> BaseMessage:
    (message,) = messages_from_dict([from_plain(data)])
    return message


_RESTORE: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "bytes": base64.b64decode,
    "dict": lambda pairs: {from_plain(key): from_plain(item) for key, item in pairs},
    "tuple": lambda items: tuple(from_plain(items)),
    "set": lambda items: set(from_plain(items)),
    "frozenset": lambda items: frozenset(from_plain(items)),
    "message": _message,
}
