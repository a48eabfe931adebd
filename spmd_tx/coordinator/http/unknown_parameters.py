"""Refuses what a request says and its route would not read: fields of JSON bodies, parameters of addresses.

OpenAI's routes have rules of their own (``openai/fields.py``), and routes that read a body themselves ask
``wire/unknown_fields.py``. Probes and pages may be asked with any parameters.
"""

from contextlib import suppress
from functools import cache
from typing import Any

import msgspec
from litestar import Request
from litestar.exceptions import SerializationException
from litestar.handlers import BaseRouteHandler
from litestar.params import QueryParameter

from spmd_tx.coordinator.http.authentication import OPEN, SIGNED, has_mark
from spmd_tx.coordinator.runtime.threads import compute
from spmd_tx.coordinator.wire import unknown_fields
from spmd_tx.errors import InvalidRequest

CHECKED = "/api/v1/", "/console/api/"
ADDRESS = {
    "run_id",
    "kind",
    "name",
}  # of a checkpoint: addresses.py looks what a ? in it means


async def refuse_unknown(request: Request) -> None:
    """Raise InvalidRequest, which names the first that is not known. Runs before each route."""
    handler: BaseRouteHandler = request.route_handler
    path = request.url.path
    if not path.startswith(CHECKED) or has_mark(handler, SIGNED) or has_mark(handler, OPEN):
        return
    if not request.path_params.keys() >= ADDRESS:
        refuse_parameters(request)
    schema = _schema_of(handler)
    size = 0 if schema is None else len(await request.body())
    if schema is None or not size:
        return
    with suppress(SerializationException):  # Litestar says so when it comes to the route's body
        await compute(size, unknown_fields.check_json, await request.json(), schema)


def refuse_parameters(request: Request) -> None:
    """Raise InvalidRequest, which names the first parameter of the address that the route does not know."""
    if has_mark(request.route_handler, SIGNED):  # whose parameters are of all routes alike
        return
    known = _parameters_of(request.route_handler)
    unknown = request.query_params.keys() - known
    if unknown:
        shown = min(unknown)[: unknown_fields.MOST_SHOWN]
        raise InvalidRequest(
            f"{request.url.path} does not know the parameter {shown!r}; leave it out. "
            f"Known: {', '.join(sorted(known)) or 'none'}"
        )


@cache
def _parameters_of(handler: BaseRouteHandler) -> frozenset[str]:
    """The names in addresses, which may differ from those in the function, and in what it depends on."""
    provided = handler.resolve_dependencies().values()
    signatures = [handler.parsed_fn_signature, *(each.parsed_fn_signature for each in provided)]
    definitions = [
        (name, field.kwarg_definition) for each in signatures for name, field in each.parameters.items()
    ]
    return frozenset(each.name or name for name, each in definitions if isinstance(each, QueryParameter))


@cache
def _schema_of(handler: BaseRouteHandler) -> type[msgspec.Struct] | None:
    """The struct that the route's body becomes; None: it has no body, or reads it itself."""
    field = handler.parsed_data_field
    kind: Any = None if field is None else field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else None
