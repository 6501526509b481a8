"""What an exception says about a graph run: who caused it, and whether the model's answer had arrived by then.

Invariant: `infrastructure` is true only for what no policy can cause. Such runs leave their group; all others are
scored, because training only on what succeeded would bias the policy.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
from langchain_core import exceptions as lc
from langgraph.errors import NodeTimeoutError
from pydantic import ValidationError

from langgraph_art.async_http import sdk_httpx
from langgraph_art.runs import RunError

_INFRASTRUCTURE = (
    # Chat models of all providers raise LangChain's classes: no connection, no time, 5xx, 429, ...
    lc.ModelConnectionError,
    lc.ModelTimeoutError,
    lc.ModelAPIError,
    lc.ModelRateLimitError,
    # ... and key or model name refused, which is a fault of the set-up.
    lc.ModelAuthenticationError,
    lc.ModelPermissionDeniedError,
    lc.ModelNotFoundError,
    NodeTimeoutError,
    TimeoutError,
    ConnectionError,
    # Errors in the middle of a stream reach us as the SDK's HTTP library raised them.
    httpx.TransportError,
    sdk_httpx.TransportError,
)
_POLICY = (lc.ContextOverflowError, lc.ModelInvalidRequestError, lc.ModelRefusalError)
_STATUS = (httpx.HTTPStatusError, sdk_httpx.HTTPStatusError)
_UNPARSED = (
    openai.LengthFinishReasonError,
    openai.ContentFilterFinishReasonError,
    ValidationError,
    lc.OutputParserException,
)


def describe(error: BaseException, node: str | None) -> RunError:
    """The record of an exception that was raised in this node."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return RunError(type=name, message=str(error) or name, node=node or None, infrastructure=infrastructure(error))


def infrastructure(error: BaseException) -> bool:
    """Whether no policy can cause this error. What says nothing itself is judged by what it was raised from."""
    verdicts = (_verdict(link) for link in causes(error))
    return next((verdict for verdict in verdicts if verdict is not None), False)


def answered(error: BaseException) -> bool:
    """Whether a model call that failed like this had its answer, which then was cut or could not be parsed."""
    return isinstance(error, _UNPARSED)


def causes(error: BaseException) -> Iterator[BaseException]:
    """The exception, and what it was raised from (``raise ... from``), outermost first."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__


def _verdict(error: BaseException) -> bool | None:
    """Infrastructure or not, by the error's own class; ``None`` if that does not tell."""
    if isinstance(error, BaseExceptionGroup):
        return any(infrastructure(part) for part in error.exceptions)
    if not isinstance(error, Exception):
        return True  # cancelled or interrupted from outside
    if isinstance(error, _POLICY):
        return False
    if isinstance(error, _INFRASTRUCTURE):
        return True
    if isinstance(error, openai.APIStatusError):
        return _away(error.status_code) or error.status_code in (401, 403, 404)
    if isinstance(error, openai.APIError):  # no status: no connection, or an error event in the middle of a stream
        return error.type != "invalid_request_error" and error.code != "context_length_exceeded"
    if isinstance(error, _STATUS):
        return _away(error.response.status_code)
    return None


def _away(status: int) -> bool:
    """Whether the server could not serve just now."""
    return status >= 500 or status in (408, 425, 429)
