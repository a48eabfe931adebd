"""Reads the bodies of training requests: protobuf, perhaps compressed, or JSON with a seq_id."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import msgspec
import zstandard
from litestar import Request

from spmd_tx.coordinator.http.services import ApiCall
from spmd_tx.coordinator.http.tinker import json_forms
from spmd_tx.coordinator.wire import protobuf_scan, training_protobuf, unknown_fields
from spmd_tx.coordinator.wire.fields import TrainingNumber
from spmd_tx.errors import UNREADABLE, InvalidRequest, NotFound

Body = TypeVar("Body", bound=msgspec.Struct)

MAX_UNPACKED_BYTES = 128 << 20
MAX_WINDOW_BYTES = 16 << 20  # of zstd; its levels up to 19 use 8 MiB
UNPACKED_AT_ONCE = 4  # bodies; even a small one may unpack to a large one

_PIECE_BYTES = 1 << 20
_SMALL_BYTES = 64 << 10  # below, a thread costs more than the work

_unpackers = ThreadPoolExecutor(UNPACKED_AT_ONCE, thread_name_prefix="unpack")


async def read_forward_backward(call: ApiCall) -> tuple[training_protobuf.Address, bytes]:
    """Return the address and the uncompressed protobuf body. Raises InvalidRequest."""
    if call.request.content_type[0] == training_protobuf.JSON:
        return await read_loss_request(call, forward_only=False)
    encoding = call.request.headers.get("content-encoding", "identity")
    body = await _whole(call.request)
    if len(body) < _SMALL_BYTES and encoding == "identity":
        return _read(body, encoding)
    return await asyncio.get_running_loop().run_in_executor(_unpackers, _read, body, encoding)


async def read_loss_request(call: ApiCall, forward_only: bool) -> tuple[training_protobuf.Address, bytes]:
    """Return the address and the body of a JSON request, converted to protobuf. Raises InvalidRequest."""
    body = await _whole(call.request)
    try:
        return await asyncio.to_thread(_read_loss, body, forward_only)
    except (*UNREADABLE, RecursionError, InvalidRequest) as error:
        raise await _refusal(call, body, error) from None


def _read_loss(body: bytes, forward_only: bool) -> tuple[training_protobuf.Address, bytes]:
    return json_forms.to_protobuf(msgspec.json.decode(body, type=json_forms.LossRequest), forward_only)


class _Numbered(msgspec.Struct, frozen=True):
    model_id: str
    seq_id: TrainingNumber


async def read_json(call: ApiCall, schema: type[Body]) -> Body:
    """Decode a JSON body. Raises InvalidRequest and consumes the request's number: nobody sends it again."""
    body = await _whole(call.request)
    try:
        decoded = msgspec.json.decode(body, type=schema)
        unknown_fields.check_json(msgspec.json.decode(body), schema)
    except (*UNREADABLE, RecursionError, InvalidRequest) as error:
        raise await _refusal(call, body, error) from None
    return decoded


async def _refusal(call: ApiCall, body: bytes, problem: Exception) -> InvalidRequest:
    """Consume the number of a request whose body cannot be read; return the error to raise."""
    with suppress(*UNREADABLE, RecursionError, NotFound):
        numbered = msgspec.json.decode(body, type=_Numbered)
        await call.model(numbered.model_id)
        call.services.scheduler.consume(numbered.model_id, numbered.seq_id)
    return InvalidRequest(f"{call.request.url.path} cannot take this body: {problem}")


async def _whole(request: Request) -> bytes:
    """Read the body without ``Request.body()``, which keeps a copy as long as the connection is idle."""
    return b"".join([piece async for piece in request.stream()])


def _read(body: bytes, encoding: str) -> tuple[training_protobuf.Address, bytes]:
    if encoding == "zstd":
        body = _decompress(body)
    elif encoding != "identity":
        raise InvalidRequest(f"Content-Encoding is {encoding!r}; send zstd, or leave it out")
    protobuf_scan.check_fields(body)
    return training_protobuf.decode_address(body), body


def _decompress(body: bytes) -> bytes:
    """Unpack one zstd frame. The size in its header is checked, not trusted."""
    pieces: list[bytes] = []
    size = 0
    unpacker = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    try:
        announced = zstandard.frame_content_size(body)  # -1: not announced
        with unpacker.stream_reader(body) as reader:
            while piece := reader.read(_PIECE_BYTES):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_UNPACKED_BYTES:
                    raise InvalidRequest(
                        f"the body unpacks to more than {MAX_UNPACKED_BYTES >> 20} MiB; "
                        "send fewer datums per request"
                    )
    except zstandard.ZstdError as error:
        raise InvalidRequest(f"the body of {len(body)} bytes is not a zstd frame: {error}") from None
    if announced not in (-1, size):
        raise InvalidRequest(
            f"the body unpacks to {size} of {announced} bytes: it is cut short, or more than one frame"
        )
    return b"".join(pieces)
