"""Reads the secret that coordinator, agents and workers share, and derives ZeroMQ keys from it."""

import os
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import zmq
from zmq.utils import z85

from spmd_tx.errors import StartError

VARIABLE = "SPMD_TX_SECRET"  # never an option: all users of a machine see the arguments of all processes
SHORTEST = 16  # characters
REMEDY = "make one with: openssl rand -hex 32 > FILE"


def read_secret(file: Path | None) -> str | None:
    """Read the secret from the file or else the environment; None if neither is there. Raises StartError."""
    if file is None:
        source, secret = VARIABLE, os.environ.get(VARIABLE)
    else:
        source = f"--secret-file {file}"
        try:
            secret = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise StartError(f"cannot read {source}: {error}; {REMEDY}") from None
    if secret is None:
        return None
    if len(secret.strip()) < SHORTEST:
        raise StartError(f"{source} has {len(secret.strip())} characters, fewer than {SHORTEST}; {REMEDY}")
    return secret.strip()


@dataclass(frozen=True)
class Keys:
    """Holds the CURVE key pairs of both ends, by which each proves that it knows the secret."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    @classmethod
    def of(cls, secret: str) -> "Keys":
        server, client = _secret_key(secret, b"server"), _secret_key(secret, b"client")
        return cls(zmq.curve_public(server), server, zmq.curve_public(client), client)

    def guard(self, socket: zmq.Socket) -> None:
        """Make a socket accept only encrypted connections; call this before it is bound."""
        socket.curve_server = True
        socket.curve_secretkey = self.server_secret

    def introduce(self, socket: zmq.Socket) -> None:
        """Make a socket encrypt and authenticate itself; call this before it connects."""
        socket.curve_serverkey = self.server_public
        socket.curve_publickey = self.client_public
        socket.curve_secretkey = self.client_secret


def _secret_key(secret: str, end: bytes) -> bytes:
    return z85.encode(blake2b(secret.encode(), digest_size=32, person=b"spmd_tx " + end).digest())
