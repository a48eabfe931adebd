"""Routes about the API key of the request itself, for ``tinker auth login`` and ``logout``."""

import msgspec
from litestar import Controller, delete, get
from litestar.status_codes import HTTP_200_OK

from spmd_tx.coordinator.http.services import ApiCall
from spmd_tx.coordinator.tenancy import keys
from spmd_tx.coordinator.tenancy.callers import Caller
from spmd_tx.coordinator.wire.fields import StatusResponse
from spmd_tx.errors import InvalidRequest

ORGANIZATION = "spmd_tx"


class Organization(msgspec.Struct, frozen=True):
    name: str


class User(msgspec.Struct, frozen=True):
    email: str  # the owner, which may be any name


class KeyDetails(msgspec.Struct, frozen=True):
    org_details: Organization
    user_details: User


class ApiKeyResponse(msgspec.Struct, frozen=True):
    """Describes a key to its holder."""

    key_id: int  # the hexadecimal id as a number; 0: no key is needed
    name: str
    note: str
    details: KeyDetails


class KeysController(Controller):
    path = "/auth/apikey"

    @get("/me")
    async def key(self, call: ApiCall) -> ApiKeyResponse:
        """Return whose key this request was sent with, and its limits."""
        return _described(call.caller)

    @delete("/me", status_code=HTTP_200_OK)
    async def revoke_key(self, call: ApiCall) -> StatusResponse:
        """Revoke the key that this request was sent with."""
        caller = call.caller
        if caller.key_id is None:
            raise InvalidRequest("this server has no API keys, so there is none to revoke")
        async with call.services.database.transaction() as db:
            await keys.revoke(db, caller.key_id, caller)
        await call.services.keyring.look()
        return StatusResponse("ok")


def _described(caller: Caller) -> ApiKeyResponse:
    details = KeyDetails(Organization(ORGANIZATION), User(caller.owner))
    if caller.key_id is None:
        return ApiKeyResponse(0, "no key", "this server lets everyone in", details)
    return ApiKeyResponse(int(caller.key_id, 16), f"{caller.owner} {caller.key_id}", caller.role, details)
