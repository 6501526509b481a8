"""One function of the user's that the text of recordings passes through before it leaves the process.

Invariant: it sees plain JSON data before they are written, and never a run in memory: rewards are computed from what
really happened. It cannot cover prompts, which go to the model as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Redaction: TypeAlias = Callable[[Any], Any]
"""Gets JSON data that it may change, and returns what is written in their place."""

_redaction: Redaction | None = None


def set_redaction(redaction: Redaction | None) -> None:
    """Set the function that hides what must not leave this process; it holds for the whole process.

    It is applied to what `save_runs` writes, and so to what a `Trainer` writes with ``out_dir=``: to each message and
    tool of a run (once), to its input, its output, its metadata, what interrupts asked and got, and the text of errors;
    and to each message and tool of the conversations that are sent for supervised fine-tuning. Ids, names of nodes and
    models, usage, times and rewards leave as they are. ``docs/recording.md`` lists what else leaves the process.

    Args:
        redaction: gets one of these as JSON data (a LangChain message inside an input or output is
            ``{"$type": "message", "value": {...}}``) and returns JSON data; a message must stay an object. What it
            raises goes to the caller, and nothing is written. ``None`` takes the function away.
    """
    global _redaction
    _redaction = redaction


def redact_texts(function: Callable[[str], str]) -> Redaction:
    """A redaction that applies a function to every text, however deep; keys, numbers and types stay.

    Args:
        function: such as ``lambda text: re.sub(r"\\S+@\\S+", "<email>", text)``.
    """

    def redaction(data: Any) -> Any:
        if isinstance(data, str):
            return function(data)
        if isinstance(data, list):
            return [redaction(item) for item in data]
        if isinstance(data, dict):
            return {key: item if _is_type(key, item) else redaction(item) for key, item in data.items()}
        return data

    return redaction


def _is_type(key: str, item: Any) -> bool:
    """Whether this says what an object or message is, without which it could not be read back, and tells nothing."""
    return key == "$type" or (key in ("type", "role") and item in _TYPES)


_TYPES = (
    *("human", "ai", "system", "tool", "function", "chat", "remove", "tool_call", "invalid_tool_call", "text"),
    *("user", "assistant", "developer"),
)


def redact(data: Any) -> Any:
    """The data as they may leave the process."""
    return data if _redaction is None else _redaction(data)


def redacts() -> bool:
    """Whether a function is set."""
    return _redaction is not None
