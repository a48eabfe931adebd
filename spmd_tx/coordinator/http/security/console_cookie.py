"""The cookie of a browser that has signed in to the console.

It holds the owner, the id of the API key and the time of expiry, signed with the secret of signed URLs, and
never the key itself. Each request with it looks at the key again.
"""

import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from urllib.parse import parse_qsl

from spmd_tx.coordinator.http.security.signed_urls import SignedUrls
from spmd_tx.coordinator.tenancy.callers import Caller
from spmd_tx.coordinator.tenancy.keyring import Keyring
from spmd_tx.errors import Forbidden, Unauthorized

NAME = "spmd_tx_console"
LIFETIME_SECONDS = 12 * 3600
SIGNED_PATH = "/console"  # no route with a signature in its URL has this path

# Other sites' pages cannot send this header, as the server answers no CORS preflight.
HEADER, HEADER_VALUE = "X-Console", "1"

AGAIN = "sign in to the console again, with an API key that is valid"


def seal(signed_urls: SignedUrls, caller: Caller) -> str:
    """Return the value of the cookie for a caller with a key."""
    expires_at = time.time() + LIFETIME_SECONDS
    url = signed_urls.sign("", SIGNED_PATH, caller.owner, caller.key_id, expires_at)
    return urlsafe_b64encode(url.partition("?")[2].encode()).decode()


def caller(value: str, signed_urls: SignedUrls, keyring: Keyring) -> Caller:
    """Return the holder of the key that somebody signed in with. Raises Unauthorized."""
    try:
        query = dict(parse_qsl(urlsafe_b64decode(value.encode()).decode()))
        signed = signed_urls.caller(SIGNED_PATH, query)
    except (ValueError, Forbidden):
        raise Unauthorized(f"the console's cookie is not valid or has expired; {AGAIN}") from None
    if signed.key_id is None:
        raise Unauthorized(f"the console's cookie names no API key; {AGAIN}")
    return keyring.holder(signed.key_id)
