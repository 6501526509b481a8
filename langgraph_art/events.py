"""LangChain's event stream, version 3, for answers with tool arguments that are JSON but no object.

Invariant: such a call ends as an invalid tool call, as it does in every other way to call. LangChain takes any JSON for
arguments here, and then fails on the finished message. Delete this file once it does not.
"""

from __future__ import annotations

import json
from typing import Any


def mended(event: Any) -> Any:
    """An event of the stream, changed only if it ends a tool call whose arguments are no object."""
    content = event.get("content") if event.get("event") == "content-block-finish" else None
    if not isinstance(content, dict) or content.get("type") != "tool_call" or isinstance(content["args"], dict):
        return event
    arguments = content["args"]
    if arguments is None:
        return {**event, "content": {**content, "args": {}}}
    text = json.dumps(arguments, ensure_ascii=False)
    error = f"Tool {content['name']!r}: arguments must be a JSON object, got {text}"
    return {**event, "content": {**content, "type": "invalid_tool_call", "args": text, "error": error}}
