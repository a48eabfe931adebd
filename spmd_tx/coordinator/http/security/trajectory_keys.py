"""Keys that can only sample in one trajectory, for sandboxes that must not hold their owner's key.

A key names the trajectory, its owner, the API key that has made it and the time of expiry, signed with the
secret of signed URLs. It is valid as long as that API key is.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import replace
from urllib.parse import parse_qsl

from spmd_tx.coordinator.http.security.signed_urls import SignedUrls
from spmd_tx.coordinator.tenancy.callers import EVERYONE, Caller
from spmd_tx.coordinator.tenancy.keyring import Keyring
from spmd_tx.errors import Forbidden, Unauthorized

PREFIX = "tml-in-"
FOLDER = "/trajectory-keys/"  # no route with a signature in its URL has such a path


def seal(signed_urls: SignedUrls, caller: Caller, owner: str, trajectory_id: str, expires_at: float) -> str:
    """Return a key that a caller makes for an owner's trajectory."""
    url = signed_urls.sign("", FOLDER + trajectory_id, owner, caller.key_id, expires_at)
    return PREFIX + urlsafe_b64encode(url.removeprefix(FOLDER).encode()).decode().rstrip("=")


def caller(key: str, signed_urls: SignedUrls, keyring: Keyring) -> Caller:
    """Return who samples with a key. Raises Unauthorized or Forbidden."""
    text = key.removeprefix(PREFIX)
    try:
        url = urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode("ascii")
        trajectory_id, _, query = url.partition("?")
        signed = signed_urls.caller(FOLDER + trajectory_id, dict(parse_qsl(query)))
    except (ValueError, Forbidden):
        raise Unauthorized(
            "the trajectory's key is not valid or has expired; ask whoever runs the agent for a new one"
        ) from None
    keyring.vouch(signed)
    holder = EVERYONE if signed.key_id is None else keyring.holder(signed.key_id)
    return replace(holder, owner=signed.owner, role="user", trajectory=trajectory_id)
