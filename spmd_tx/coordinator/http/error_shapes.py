"""Shapes error responses as the API of their path has them. http/errors.py chooses status and message."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.status_codes import HTTP_500_INTERNAL_SERVER_ERROR
from litestar.types import ExceptionHandler, ExceptionHandlersMap

from spmd_tx.coordinator.http import errors


@dataclass(frozen=True)
class ErrorShape:
    """Says how errors look below one path, also where there is no route."""

    prefix: str
    body: Callable[[str, int, Any], msgspec.Struct]  # of the message, the status and the error
    statuses: Mapping[int, int] = field(default_factory=dict)  # where the API has others than we

    def has(self, path: str) -> bool:
        return path == self.prefix or path.startswith(f"{self.prefix}/")

    def response(self, plain: Response[Any], error: Any) -> Response[Any]:
        """Return a response in this shape."""
        status, headers = plain.status_code, dict(plain.headers)
        assert status is not None
        if status == HTTP_500_INTERNAL_SERVER_ERROR:
            headers["x-should-retry"] = "false"  # these clients retry every 500, but ours are permanent
        body = self.body(plain.content["error"], status, error)
        return Response(body, status_code=self.statuses.get(status, status), headers=headers)


def handlers(shapes: Sequence[ErrorShape]) -> ExceptionHandlersMap:
    """Return handlers for the whole application: where there is no route, no others apply."""
    return {kind: _shaped(handler, shapes) for kind, handler in errors.EXCEPTION_HANDLERS.items()}


def _shaped(handler: ExceptionHandler, shapes: Sequence[ErrorShape]) -> ExceptionHandler:
    def handle(request: Request, error: Any) -> Response[Any]:
        plain = handler(request, error)
        path = request.scope["path"]
        shape = next((each for each in shapes if each.has(path)), None)
        return plain if shape is None else shape.response(plain, error)

    return handle
