"""Bodies of training requests: protobuf, perhaps compressed, and JSON that carries a seq_id."""

import asyncio
from contextlib import suppress
from typing import TypeVar

import msgspec
import zstandard
from litestar import Request

from spmd_tx.coordinator import json_forms, wire
from spmd_tx.coordinator.access import Access
from spmd_tx.coordinator.dependencies import RequestScheduler
from spmd_tx.errors import InvalidRequest, NotFound

Body = TypeVar("Body", bound=msgspec.Struct)

MAX_UNPACKED_BYTES = 512 << 20
_PIECE_BYTES = 1 << 20
_SMALL_BYTES = 64 << 10  # below, a thread costs more than the work


async def read_forward_backward(
    request: Request, scheduler: RequestScheduler, access: Access
) -> tuple[wire.Address, bytes]:
    """The protobuf body, uncompressed, and whom it is for. Raises InvalidRequest when it does not parse."""
    if request.content_type[0] == wire.JSON:
        return await read_loss_request(request, scheduler, access, forward_only=False)
    encoding = request.headers.get("content-encoding", "identity")
    body = await request.body()
    if len(body) < _SMALL_BYTES:
        return _read(body, encoding)
    return await asyncio.to_thread(_read, body, encoding)


async def read_loss_request(
    request: Request, scheduler: RequestScheduler, access: Access, forward_only: bool
) -> tuple[wire.Address, bytes]:
    """A JSON body, rewritten as protobuf, and whom it is for."""
    body = await read_json(request, json_forms.LossRequest, scheduler, access)
    return await asyncio.to_thread(json_forms.to_protobuf, body, forward_only)


class _Numbered(msgspec.Struct, frozen=True):
    model_id: str
    seq_id: int


async def read_json(
    request: Request, schema: type[Body], scheduler: RequestScheduler, access: Access
) -> Body:
    """A JSON body. The number of a request that is refused is used up: nobody will send it again."""
    body = await request.body()
    try:
        return msgspec.json.decode(body, type=schema)
    except msgspec.DecodeError as error:
        with suppress(msgspec.DecodeError, NotFound):
            numbered = msgspec.json.decode(body, type=_Numbered)
            await access.model(numbered.model_id)
            scheduler.consume(numbered.model_id, numbered.seq_id)
        raise InvalidRequest(f"{request.url.path} cannot take this body: {error}") from None


def _read(body: bytes, encoding: str) -> tuple[wire.Address, bytes]:
    if encoding == "zstd":
        body = _decompress(body)
    elif encoding != "identity":
        raise InvalidRequest(f"Content-Encoding is {encoding!r}; send zstd, or leave it out")
    return wire.decode_address(body), body


def _decompress(body: bytes) -> bytes:
    pieces: list[bytes] = []
    size = 0
    try:
        announced = zstandard.frame_content_size(body)  # -1: not announced
        with zstandard.ZstdDecompressor().stream_reader(body) as reader:
            while piece := reader.read(_PIECE_BYTES):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_UNPACKED_BYTES:
                    raise InvalidRequest(
                        f"the body unpacks to more than {MAX_UNPACKED_BYTES >> 20} MiB; "
                        "send fewer datums per request"
                    )
    except zstandard.ZstdError as error:
        raise InvalidRequest(f"the body of {len(body)} bytes is no zstd frame: {error}") from None
    if announced not in (-1, size):
        raise InvalidRequest(f"the body is cut short: {size} of {announced} bytes")
    return b"".join(pieces)
