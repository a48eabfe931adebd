"""Routes for a key about itself, as `tinker auth login` and `logout` ask for them."""

import msgspec
from litestar import Controller, delete, get
from litestar.status_codes import HTTP_200_OK

from spmd_tx.coordinator import keys
from spmd_tx.coordinator.callers import Caller
from spmd_tx.coordinator.dependencies import Accessible, Service
from spmd_tx.coordinator.schemas import StatusResponse
from spmd_tx.errors import InvalidRequest

ORGANIZATION = "spmd_tx"  # there is one per server

ME = "/auth/apikey/me"


class OrganizationDetails(msgspec.Struct, frozen=True):
    name: str


class UserDetails(msgspec.Struct, frozen=True):
    email: str


class ApiKeyDetails(msgspec.Struct, frozen=True):
    org_details: OrganizationDetails
    user_details: UserDetails


class ApiKeyResponse(msgspec.Struct, frozen=True):
    """Of whom a key is; the SDK stores all of it beside the key."""

    key_id: int
    name: str
    note: str
    details: ApiKeyDetails


class AuthController(Controller):
    path = "/api/v1"

    @get(ME)
    async def api_key(self, access: Accessible) -> ApiKeyResponse:
        """What the holder of this key may know of it."""
        return _describe(access.caller)

    @delete(ME, status_code=HTTP_200_OK)
    async def revoke_api_key(self, access: Accessible, services: Service) -> StatusResponse:
        """End the key that the request is sent with, and no other."""
        if access.caller.key_id is None:
            raise InvalidRequest("this server has no API keys, so there is none to delete")
        async with services.database.transaction() as db:
            await keys.revoke(db, access.caller.key_id)
        await services.keyring.look()
        return StatusResponse("ok")


def _describe(caller: Caller) -> ApiKeyResponse:
    details = ApiKeyDetails(OrganizationDetails(ORGANIZATION), UserDetails(caller.owner))
    if caller.key_id is None:
        return ApiKeyResponse(0, "no key", "this server has no API keys and lets everybody in", details)
    note = f"key {caller.key_id} with the role {caller.role}"
    return ApiKeyResponse(int(caller.key_id, 16), caller.owner, note, details)
