"""The guard of every route: whose key is it, and may its holder do this. The only place that reads a key."""

from typing import Any

from litestar.connection import ASGIConnection
from litestar.datastructures import Headers
from litestar.handlers import BaseRouteHandler

from spmd_tx.coordinator.http import cross_site
from spmd_tx.coordinator.http.services import Services
from spmd_tx.errors import Forbidden, InvalidRequest

IS_OPEN = "is_open"
IS_READING = "is_reading"
IS_UNMETERED = "is_unmetered"
IS_SIGNED = "is_signed"
IS_DROPPED = "is_dropped"
HAS_PROMPTS = "has_prompts"
HAS_BATCH = "has_batch"

OPEN: dict[str, Any] = {IS_OPEN: True}  # for probes, which have no key
READS: dict[str, Any] = {IS_READING: True}  # changes nothing, although it is no GET
SIGN_OF_LIFE: dict[str, Any] = {
    IS_UNMETERED: True
}  # the SDK sends it by itself, however little its user does
SIGNED: dict[str, Any] = {IS_SIGNED: True}  # wants no key, but a signature in the URL (signed_urls.py)
SDK_READS: dict[str, Any] = READS | SIGN_OF_LIFE
DROPS: dict[str, Any] = SDK_READS | {IS_DROPPED: True}  # of its body nothing is kept, not even in memory
PROMPTS: dict[str, Any] = {HAS_PROMPTS: True}  # its body may be as large as prompts are
BATCH: dict[str, Any] = {HAS_BATCH: True}  # its body may be as large as any


BEARER = "bearer "


async def authenticate(connection: ASGIConnection, route: BaseRouteHandler) -> None:
    """Find out who calls, or refuse them: 401 without a valid key, 403 beyond its role, 429 too often.

    403, too, for a URL that is not signed, or no longer by a valid key. It never waits, but a guard that is
    no coroutine would run in a thread, which costs more than all that it does.
    """
    if IS_OPEN in route.opt:
        return
    if "\0" in connection.scope["path"] or b"%00" in connection.scope["query_string"]:
        raise InvalidRequest("the address holds the character NUL, which no name has; leave it out")
    services: Services = connection.app.state.services
    if services.keyring.is_open:
        cross_site.keep_out(connection.headers, services.config)
    if IS_SIGNED in route.opt:
        reader = services.signed_urls.caller(connection.scope["path"], connection.query_params)
        services.keyring.vouch(reader)
        connection.scope["auth"] = reader
        return
    caller = services.keyring.caller(presented_key(connection.headers))
    method = connection.scope.get("method")
    if caller.role == "read-only" and method != "GET" and IS_READING not in route.opt:
        raise Forbidden(
            f"API key {caller.key_id} may only read, and {method} {connection.url.path} changes something; "
            "use a key with the role user"
        )
    if IS_UNMETERED in route.opt:
        services.quotas.count_poll(caller)
    else:
        services.quotas.count_request(caller)
    connection.scope["auth"] = caller


def presented_key(headers: Headers) -> str | None:
    """As the Tinker SDK sends it, or as most other clients do."""
    key = headers.get("x-api-key")
    authorization = headers.get("authorization", "")
    if key is None and authorization.lower().startswith(BEARER):
        key = authorization[len(BEARER) :].strip()
    return key
