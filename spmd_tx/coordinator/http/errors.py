"""Maps errors to HTTP responses, in one place. Each body has a message and the category of the fault."""

import gc
import logging
import math
import traceback
from collections.abc import Mapping

from litestar import Request, Response
from litestar.exceptions import HTTPException, InternalServerException, SerializationException
from litestar.status_codes import (
    HTTP_400_BAD_REQUEST,
    HTTP_413_REQUEST_ENTITY_TOO_LARGE,
    HTTP_500_INTERNAL_SERVER_ERROR,
    HTTP_503_SERVICE_UNAVAILABLE,
)
from litestar.types import ExceptionHandlersMap
from sqlalchemy.exc import SQLAlchemyError

from spmd_tx.coordinator.runtime import containment
from spmd_tx.coordinator.storage.outages import is_outage
from spmd_tx.coordinator.wire.fields import storable
from spmd_tx.errors import (
    Abandoned,
    BodyTooSlow,
    DatabaseDamaged,
    DatabaseTaken,
    RequestError,
    SpmdTxError,
    TooManyRequests,
    Unavailable,
)

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20

ErrorResponse = Response[dict[str, str]]
BODY = "data"  # the name of the parameter of routes
CLIENT_LEFT = "client disconnected prematurely"  # the words of Litestar, which has no class for it


def error_response(message: str, status: int) -> ErrorResponse:
    """Make an error response. Some SDK versions read ``detail``, others ``error``; all show the body."""
    message = storable(message)
    category = "server" if status >= HTTP_500_INTERNAL_SERVER_ERROR else "user"
    return Response({"detail": message, "error": message, "category": category}, status_code=status)


def status_of(error: SpmdTxError) -> int:
    """Return the status of an error, also for a stream whose own status has been sent already."""
    if isinstance(error, RequestError):
        return error.status
    return HTTP_503_SERVICE_UNAVAILABLE if isinstance(error, Unavailable) else HTTP_500_INTERNAL_SERVER_ERROR


def _known_error(_: Request, error: SpmdTxError) -> ErrorResponse:
    response = error_response(str(error), status_of(error))
    if isinstance(error, TooManyRequests):
        response.headers["Retry-After"] = str(math.ceil(error.seconds))
    if isinstance(error, BodyTooSlow):
        response.headers["Connection"] = "close"  # the rest of the body may still arrive
    return response


def _nested_too_deeply(request: Request, _: RecursionError) -> ErrorResponse:
    """Only JSON bodies have unlimited nesting, so the client is at fault."""
    return error_response(f"the body of {request.url.path} is nested too deeply", HTTP_400_BAD_REQUEST)


def _not_utf8(request: Request, error: UnicodeDecodeError) -> ErrorResponse:
    """Of what routes decode, only JSON bodies are not the server's own."""
    return error_response(f"the body of {request.url.path} is no valid JSON: {error}", HTTP_400_BAD_REQUEST)


def _storage_error(request: Request, error: SQLAlchemyError | OSError) -> ErrorResponse:
    """Let the client try again: a database that was restarted comes back, and so does a full disk."""
    if isinstance(error, SQLAlchemyError) and not is_outage(error):
        return _internal_error(request, error)
    logger.error("%s %r: the database or the disk failed: %s", request.method, request.url.path, error)
    return error_response("the server's storage does not answer; try again", HTTP_503_SERVICE_UNAVAILABLE)


def _end_of_storage(_: Request, error: DatabaseDamaged | DatabaseTaken) -> ErrorResponse:
    """Answer while the server ends, which logs why."""
    return error_response("the server has lost its database", HTTP_503_SERVICE_UNAVAILABLE)


def _http_error(request: Request, error: HTTPException) -> ErrorResponse:
    """Litestar refused the request: no such route, an invalid body, a body too large."""
    message = f"{error.detail} ({request.method} {request.url.path})"
    if error.status_code == HTTP_413_REQUEST_ENTITY_TOO_LARGE:
        message = f"the body is larger than {MAX_BODY_BYTES >> 20} MiB; send fewer datums per request"
    elif isinstance(error.__cause__, SerializationException):
        message = f"the body of {request.url.path} is no valid JSON: {error.detail}"
    elif isinstance(error.extra, list):
        message = f"{request.url.path} cannot take this request: {'; '.join(map(_description, error.extra))}"
    response = error_response(message, error.status_code)
    response.headers.update(error.headers or {})  # such as the methods that a route has
    _free_body(error)
    return response


def _free_body(error: BaseException) -> None:
    """Clear the frames that an error went through, and those of the errors that they hold.

    Litestar's frames are in a cycle with the errors of fields, and hold the body, as text and decoded. The
    garbage collector comes by too seldom for large ones.
    """
    errors = [error]
    for each in errors:
        referents = [each.__cause__, each.__context__]
        for frame, _ in traceback.walk_tb(each.__traceback__):
            referents += gc.get_referents(frame)  # unlike f_locals, it leaves no copy with the frame
        errors += [other for other in referents if isinstance(other, BaseException) and other not in errors]
        traceback.clear_frames(each.__traceback__)


def _description(place: Mapping[str, str]) -> str:
    """Say what is wrong with a part of a request. Litestar calls a whole body "data"."""
    key, message = place.get("key"), place.get("message")
    if key != BODY:
        return f"{key}: {message}"
    return "it has no body; send a JSON object" if message == repr(BODY) else f"{message}"


def _internal_error(request: Request, error: Exception) -> ErrorResponse:
    if isinstance(error, InternalServerException) and error.detail == CLIENT_LEFT:
        # Nobody reads this, and it is no fault: a program that ends leaves its polls behind.
        return error_response(CLIENT_LEFT, HTTP_500_INTERNAL_SERVER_ERROR)
    text = containment.report(error, f"{request.method} {request.url.path}")
    return error_response(text, HTTP_500_INTERNAL_SERVER_ERROR)


EXCEPTION_HANDLERS: ExceptionHandlersMap = {
    RequestError: _known_error,
    RecursionError: _nested_too_deeply,
    UnicodeDecodeError: _not_utf8,
    Abandoned: _known_error,
    Unavailable: _known_error,
    SQLAlchemyError: _storage_error,
    OSError: _storage_error,
    DatabaseDamaged: _end_of_storage,
    DatabaseTaken: _end_of_storage,
    HTTPException: _http_error,
    InternalServerException: _internal_error,
    HTTP_500_INTERNAL_SERVER_ERROR: _internal_error,
}
