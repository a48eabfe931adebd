"""Authentication: the guard of all routes, and the marks that routes carry for it and for the body guard.

This is the only place that reads a key. The marks are options of a route (``opt=``).
"""

from typing import Any

from litestar.connection import ASGIConnection
from litestar.datastructures import Headers
from litestar.handlers import BaseRouteHandler

from spmd_tx.coordinator.http.security import console_cookie, cross_site, trajectory_keys
from spmd_tx.coordinator.http.services import Services
from spmd_tx.coordinator.runtime.owner_turns import OWNER
from spmd_tx.coordinator.tenancy.callers import Caller
from spmd_tx.errors import Forbidden, InvalidRequest

OPEN: dict[str, Any] = {"is_open": True}  # needs no key: for probes
READS: dict[str, Any] = {"is_reading": True}  # changes nothing, although it is no GET
UNMETERED: dict[str, Any] = {"is_unmetered": True}  # the SDK sends it whatever its user does
SIGNED: dict[str, Any] = {"is_signed": True}  # needs a signature in the URL instead of a key (signed_urls.py)
SDK_READS: dict[str, Any] = READS | UNMETERED
DROPS: dict[str, Any] = SDK_READS | {"is_dropped": True}  # its body is dropped as it arrives
# Its body goes to disk as it arrives; the route bounds it.
STREAMED: dict[str, Any] = {"is_streamed": True}
PROMPTS: dict[str, Any] = {"has_prompts": True}  # its body may be as large as prompts
BATCH: dict[str, Any] = {"has_batch": True}  # its body may be as large as any

BEARER = "bearer "
IN_TRAJECTORY = "trajectory"  # the parameter of paths whose calls are kept in one


def has_mark(route: BaseRouteHandler, mark: dict[str, Any]) -> bool:
    return mark.items() <= route.opt.items()


async def authenticate(connection: ASGIConnection, route: BaseRouteHandler) -> None:
    """Set the caller, or refuse: 401 without a valid key, 403 beyond its role, 429 too often.

    A URL without a valid signature is refused with 403, too. This is a coroutine, although it never waits:
    another guard would run in a thread, which costs more than the check.
    """
    if has_mark(route, OPEN):
        return
    if "\0" in connection.scope["path"] or b"%00" in connection.scope["query_string"]:
        raise InvalidRequest("the address holds the character NUL, which no name has; leave it out")
    services: Services = connection.app.state.services
    if services.keyring.is_open:
        is_signed_file = has_mark(route, SIGNED | STREAMED)
        cross_site.keep_out(connection.headers, services.config, is_signed_file=is_signed_file)
    if has_mark(route, SIGNED):
        reader = services.signed_urls.caller(connection.scope["path"], connection.query_params)
        services.keyring.vouch(reader)
        connection.scope["auth"] = reader
        return
    caller = _caller(connection, services)
    method = connection.scope.get("method")
    if caller.role == "read-only" and method != "GET" and not has_mark(route, READS):
        raise Forbidden(
            f"API key {caller.key_id} may only read, and {method} {connection.url.path} changes something; "
            "use a key with the role user"
        )
    if has_mark(route, UNMETERED):
        services.quotas.count_poll(caller)
    else:
        services.quotas.count_request(caller)
    connection.scope["auth"] = caller
    OWNER.set(caller.owner)


def _caller(connection: ASGIConnection, services: Services) -> Caller:
    """Return who holds the request's key or, without one, who has signed in to the console."""
    token = presented_key(connection.headers)
    if token is not None and token.startswith(trajectory_keys.PREFIX):
        return _sampling_caller(token, connection, services)
    value = None if token is not None else connection.cookies.get(console_cookie.NAME)
    if value is None or services.keyring.is_open:
        return services.keyring.caller(token)
    if connection.scope.get("method") not in ("GET", "HEAD"):
        check_console_header(connection.headers)
    return console_cookie.caller(value, services.signed_urls, services.keyring)


def _sampling_caller(token: str, connection: ASGIConnection, services: Services) -> Caller:
    """Return who holds the key of a trajectory. Raises Forbidden for what is not below its address."""
    caller = trajectory_keys.caller(token, services.signed_urls, services.keyring)
    if IN_TRAJECTORY not in connection.path_params:
        raise Forbidden(
            "this key can only sample in one trajectory, below the base URL that came with it; use an API key"
        )
    return caller


def check_console_header(headers: Headers) -> None:
    """Raise Forbidden for what a page of another site may have sent with the console's cookie."""
    name, value = console_cookie.HEADER, console_cookie.HEADER_VALUE
    if headers.get(name) != value:
        raise Forbidden(
            f"the console's pages send {name}: {value} with each change, and this request does not"
        )


def presented_key(headers: Headers) -> str | None:
    """Return the key from X-Api-Key (the Tinker SDK's header), or else from Authorization: Bearer."""
    key = headers.get("x-api-key")
    authorization = headers.get("authorization", "")
    if key is None and authorization.lower().startswith(BEARER):
        key = authorization[len(BEARER) :].strip()
    return key
