"""Error responses in OpenAI's format. http/errors.py chooses their status."""

from typing import Any

from litestar import Request, Response
from litestar.status_codes import (
    HTTP_401_UNAUTHORIZED,
    HTTP_403_FORBIDDEN,
    HTTP_404_NOT_FOUND,
    HTTP_429_TOO_MANY_REQUESTS,
    HTTP_500_INTERNAL_SERVER_ERROR,
)
from litestar.types import ExceptionHandler, ExceptionHandlersMap

from spmd_tx.coordinator.http import errors
from spmd_tx.coordinator.http.openai.schemas import ErrorBody, ErrorDetail

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
    fault = "server_error" if status >= HTTP_500_INTERNAL_SERVER_ERROR else "invalid_request_error"
    return ErrorBody(ErrorDetail(message, _TYPES.get(status, fault), _CODES.get(status)))


def _reshaped(handler: ExceptionHandler) -> ExceptionHandler:
    def handle(request: Request, error: Any) -> Response[ErrorBody]:
        plain = handler(request, error)
        assert plain.status_code is not None
        # OpenAI's client retries every 500, but this server's are permanent.
        headers = {"x-should-retry": "false"} if plain.status_code == HTTP_500_INTERNAL_SERVER_ERROR else {}
        body = error_body(plain.content["error"], plain.status_code)
        return Response(body, status_code=plain.status_code, headers=headers)

    return handle


EXCEPTION_HANDLERS: ExceptionHandlersMap = {
    kind: _reshaped(handler) for kind, handler in errors.EXCEPTION_HANDLERS.items()
}
