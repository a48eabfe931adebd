"""Seals of sampled turns: clients keep them and send them back, and nobody else can make them.

A seal is the turn's id with a MAC (HMAC-SHA256) over it and its owner.
"""

import base64
import binascii
import hmac
from hashlib import sha256

MAC_BYTES = 16
PURPOSE = b"sampled turn\n"  # the secret has other uses


class TurnSeals:
    """Makes and opens seals. They outlive a restart, as the secret is kept."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def seal(self, owner: str, turn_id: str) -> str:
        """Return the seal of an owner's turn: letters, digits, ``-`` and ``_``."""
        sealed = self._mac(owner, turn_id.encode()) + turn_id.encode()
        return base64.urlsafe_b64encode(sealed).decode().rstrip("=")

    def open(self, owner: str, seal: str) -> str | None:
        """Return the id of the turn; None for what is no seal of this owner's turns."""
        try:
            sealed = base64.b64decode(seal + "=" * (-len(seal) % 4), b"-_", validate=True)
            mac, turn_id = sealed[:MAC_BYTES], sealed[MAC_BYTES:]
            return turn_id.decode() if hmac.compare_digest(mac, self._mac(owner, turn_id)) else None
        except (binascii.Error, ValueError):
            return None

    def _mac(self, owner: str, turn_id: bytes) -> bytes:
        text = PURPOSE + owner.encode(errors="surrogatepass") + b"\n" + turn_id
        return hmac.new(self._secret, text, sha256).digest()[:MAC_BYTES]
