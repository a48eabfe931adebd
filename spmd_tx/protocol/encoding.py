"""How messages between processes are encoded: msgpack, with arrays as their type, shape and bytes."""

from typing import Any

import msgspec
import numpy as np

from spmd_tx.protocol.envelope import Envelope
from spmd_tx.protocol.setup import Setup


def _pack(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).data
    raise TypeError(f"cannot send a {type(value).__name__}")


def unpack_array(kind: type, value: Any) -> np.ndarray:
    """Decode an array, as ``dec_hook`` of msgspec; it is read-only and shares the memory of the message."""
    dtype, shape, buffer = value
    return np.frombuffer(buffer, dtype).reshape(shape)


encode = msgspec.msgpack.Encoder(enc_hook=_pack).encode
decode_to_worker = msgspec.msgpack.Decoder(Setup | Envelope, dec_hook=unpack_array).decode
