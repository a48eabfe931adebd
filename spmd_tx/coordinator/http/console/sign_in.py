"""Routes that sign a browser in to the console, and out."""

import msgspec
from litestar import Controller, Request, Response, delete, get, post
from litestar.connection import ASGIConnection
from litestar.datastructures import Cookie
from litestar.handlers import BaseRouteHandler
from litestar.params import JSONBody
from litestar.status_codes import HTTP_200_OK

from spmd_tx.coordinator.http.authentication import OPEN, UNMETERED, check_console_header
from spmd_tx.coordinator.http.public_address import base_url
from spmd_tx.coordinator.http.security import console_cookie, cross_site
from spmd_tx.coordinator.http.services import ApiCall, Service, Services
from spmd_tx.coordinator.storage.tables import Role
from spmd_tx.coordinator.tenancy.callers import Caller
from spmd_tx.coordinator.wire.fields import StatusResponse

MOST_BYTES = 4096  # anybody may send this body


class SignInRequest(msgspec.Struct, frozen=True):
    api_key: str


class SignedIn(msgspec.Struct, frozen=True):
    """Tells a page who uses it."""

    owner: str
    role: Role
    is_read_only: bool
    needs_key: bool  # False: the server has no API keys and lets everyone in


async def keep_out(connection: ASGIConnection, _: BaseRouteHandler) -> None:
    """Keep pages of other sites from signing a browser in or out. Raises Forbidden and UnsupportedBody."""
    services: Services = connection.app.state.services
    check_console_header(connection.headers)
    if services.keyring.is_open:
        cross_site.keep_out(connection.headers, services.config)


class SignInController(Controller):
    path = "/console/api/session"

    @get("/", opt=UNMETERED)
    async def who(self, call: ApiCall) -> SignedIn:
        """Return who is signed in."""
        return _described(call.caller, call.services)

    @post("/", opt=OPEN, guards=[keep_out], status_code=HTTP_200_OK, request_max_body_size=MOST_BYTES)
    async def sign_in(
        self, request: Request, services: Service, data: JSONBody[SignInRequest]
    ) -> Response[SignedIn]:
        """Set the cookie. A server without keys sets none, as it needs none."""
        caller = services.keyring.caller(data.api_key)
        services.quotas.count_request(caller)
        answer = Response(_described(caller, services))
        if caller.key_id is not None:
            answer.set_cookie(_cookie(request, services, console_cookie.seal(services.signed_urls, caller)))
        return answer

    @delete("/", opt=OPEN, guards=[keep_out], status_code=HTTP_200_OK)
    async def sign_out(self, request: Request, services: Service) -> Response[StatusResponse]:
        """Delete the cookie in this browser, whether it is still valid or not."""
        answer = Response(StatusResponse("ok"))
        answer.set_cookie(_cookie(request, services, "", max_age=0))
        return answer


def _described(caller: Caller, services: Services) -> SignedIn:
    return SignedIn(caller.owner, caller.role, caller.role == "read-only", not services.keyring.is_open)


def _cookie(
    request: Request, services: Services, value: str, max_age: int = console_cookie.LIFETIME_SECONDS
) -> Cookie:
    is_https = base_url(request, services.config.trusted_proxies).startswith("https:")
    return Cookie(
        console_cookie.NAME, value=value, max_age=max_age, httponly=True, secure=is_https, samesite="strict"
    )
