"""Error responses in the format of Anthropic's API. http/errors.py chooses their status."""

from typing import Any, Literal

import msgspec
from litestar.status_codes import (
    HTTP_401_UNAUTHORIZED,
    HTTP_403_FORBIDDEN,
    HTTP_404_NOT_FOUND,
    HTTP_413_REQUEST_ENTITY_TOO_LARGE,
    HTTP_429_TOO_MANY_REQUESTS,
    HTTP_500_INTERNAL_SERVER_ERROR,
    HTTP_503_SERVICE_UNAVAILABLE,
)

from spmd_tx.coordinator.http.error_shapes import ErrorShape

OVERLOADED = 529  # their status for what 503 is elsewhere

_TYPES = {
    HTTP_401_UNAUTHORIZED: "authentication_error",
    HTTP_403_FORBIDDEN: "permission_error",
    HTTP_404_NOT_FOUND: "not_found_error",
    HTTP_413_REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTP_429_TOO_MANY_REQUESTS: "rate_limit_error",
    HTTP_503_SERVICE_UNAVAILABLE: "overloaded_error",
}


class MessagesErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str


class MessagesError(msgspec.Struct, frozen=True):
    """Is the body of a response, or the content of an event."""

    error: MessagesErrorDetail
    type: Literal["error"] = "error"


def error_body(message: str, status: int, _: Any = None) -> MessagesError:
    """Return the body for an error with this status."""
    fault = "api_error" if status >= HTTP_500_INTERNAL_SERVER_ERROR else "invalid_request_error"
    return MessagesError(MessagesErrorDetail(_TYPES.get(status, fault), message))


ERRORS = ErrorShape("/anthropic", error_body, {HTTP_503_SERVICE_UNAVAILABLE: OVERLOADED})
