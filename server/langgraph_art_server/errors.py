"""What can go wrong in a request, as one small hierarchy; ``app`` turns each into OpenAI's error form."""

from __future__ import annotations

from langgraph_art.protocol import ErrorBody


class ApiError(Exception):
    """An error that the client is told about.

    Args:
        message: What was wrong, where, and what to do. Must hold no secret and no path.
        code: Machine-readable cause in OpenAI's style.
        retry_after: Seconds after which a retry makes sense, sent as ``Retry-After``.
    """

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, code: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.retry_after = retry_after


class BadRequest(ApiError):
    """The request cannot be right, now or later."""

    status = 400
    type = "invalid_request_error"


class Unauthorized(ApiError):
    """The API key is missing or wrong."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class NotFound(ApiError):
    """The thing that was named does not exist."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class Conflict(ApiError):
    """The request contradicts what is stored."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"


class Unavailable(ApiError):
    """The server cannot answer now; a retry may work."""

    status = 503
    type = "server_error"
    code = "unavailable"


def body_of(error: ApiError) -> dict[str, str | None]:
    """The inner object of an error answer, in OpenAI's form."""
    return ErrorBody(message=error.message, type=error.type, code=error.code).model_dump()
