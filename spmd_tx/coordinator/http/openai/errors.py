"""Error responses in OpenAI's format. http/errors.py chooses their status."""

from collections.abc import Mapping
from typing import Any

import msgspec
from litestar.exceptions import MethodNotAllowedException, NotFoundException
from litestar.status_codes import (
    HTTP_401_UNAUTHORIZED,
    HTTP_403_FORBIDDEN,
    HTTP_404_NOT_FOUND,
    HTTP_429_TOO_MANY_REQUESTS,
    HTTP_500_INTERNAL_SERVER_ERROR,
    HTTP_503_SERVICE_UNAVAILABLE,
)

from spmd_tx.coordinator.http import errors
from spmd_tx.coordinator.http.error_shapes import ErrorShape
from spmd_tx.coordinator.http.openai.schemas import ErrorBody, ErrorDetail
from spmd_tx.coordinator.http.text_generation.field_checks import OTHER_VALUE
from spmd_tx.errors import NotRendered, PromptTooLong, UnknownResponse, WrongField

TOO_LONG = "context_length_exceeded"
UNKNOWN_RESPONSE = "previous_response_not_found"
INTERNAL, UNAVAILABLE = HTTP_500_INTERNAL_SERVER_ERROR, HTTP_503_SERVICE_UNAVAILABLE

_TYPES = {
    HTTP_401_UNAUTHORIZED: "authentication_error",
    HTTP_403_FORBIDDEN: "permission_error",
    HTTP_404_NOT_FOUND: "not_found_error",
    HTTP_429_TOO_MANY_REQUESTS: "rate_limit_error",
}
_CODES = {
    HTTP_401_UNAUTHORIZED: "invalid_api_key",
    HTTP_404_NOT_FOUND: "model_not_found",
    HTTP_429_TOO_MANY_REQUESTS: "rate_limit_exceeded",
}


def error_body(message: str, status: int) -> ErrorBody:
    """Return the body for an error of a model's or a key's; for an event, too."""
    fault = "server_error" if status >= HTTP_500_INTERNAL_SERVER_ERROR else "invalid_request_error"
    return ErrorBody(ErrorDetail(message, _TYPES.get(status, fault), _CODES.get(status)))


def _body(message: str, status: int, error: Any) -> ErrorBody:
    match error:
        case WrongField():
            return ErrorBody(ErrorDetail(message, "invalid_request_error", error.code, error.param))
        case UnknownResponse():
            param = "previous_response_id"
            return ErrorBody(ErrorDetail(message, "invalid_request_error", UNKNOWN_RESPONSE, param))
        case PromptTooLong():
            return ErrorBody(ErrorDetail(message, "invalid_request_error", TOO_LONG))
        case NotRendered():
            return ErrorBody(ErrorDetail(message, "invalid_request_error", OTHER_VALUE, "messages"))
        case NotFoundException() | MethodNotAllowedException():
            return ErrorBody(ErrorDetail(message, "invalid_request_error"))
        case _:
            body = error_body(message, status)
            return ErrorBody(msgspec.structs.replace(body.error, param=_wrong_field(error)))


def _wrong_field(error: Any) -> str | None:
    """Return the first field that does not fit, if that is what Litestar has found."""
    places = getattr(error, "extra", None)
    first = places[0] if isinstance(places, list) and places else None
    key = first.get("key") if isinstance(first, Mapping) else None
    return None if key == errors.BODY else key


ERRORS = ErrorShape("/oai", _body)
