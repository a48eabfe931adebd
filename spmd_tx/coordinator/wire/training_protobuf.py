"""Reads protobuf bodies of training into numpy structs, and writes results. Checks framing, not values."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError, Message

from spmd_tx.coordinator.wire import tinker_pb2 as pb
from spmd_tx.coordinator.wire import unknown_fields
from spmd_tx.errors import InvalidRequest
from spmd_tx.images.placed import PlacedImage

PROTOBUF = "application/x-protobuf"
JSON = "application/json"

MAX_ELEMENTS = 1 << 26  # of a tensor, and of all sparse tensors of a request, which could claim any shape
MAX_IMAGE_TOKENS = 1 << 22  # of all images of a request: a few bytes may claim thousands
TOO_MANY_IMAGE_TOKENS = (
    f"with it, the images of this request have more than {MAX_IMAGE_TOKENS} tokens; send fewer datums at once"
)
MAX_RANK = 4  # numpy has a limit of its own; nothing here uses more than 2

_INT32, _INT64, _FLOAT32 = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f4")
_DTYPES = {
    pb.DTYPE_FLOAT32: _FLOAT32,
    pb.DTYPE_INT64: _INT64,
    pb.DTYPE_INT32: _INT32,
    pb.DTYPE_BFLOAT16: np.dtype("<u2"),
}


class TokenSpan(NamedTuple):
    """Says where a run of a datum's tokens comes from."""

    sequence_id: str
    is_sampled: bool  # the offset counts within the sampled tokens, otherwise within the prompt
    offset: int
    length: int


@dataclass(frozen=True)
class Datum:
    """Holds one training example. A datum with a ``problem`` cannot be used, for that reason."""

    tokens: np.ndarray  # int32 [N]; 0 for those of images
    loss_inputs: dict[str, np.ndarray]  # dense float32 or int64, in the shape that was sent
    problem: str | None = None
    spans: tuple[TokenSpan, ...] = ()  # tile the tokens; empty if none were sent
    target_spans: tuple[TokenSpan, ...] = ()  # tile the targets
    images: tuple[PlacedImage, ...] = ()
    span_problem: str | None = None  # why the spans that were sent are unusable; few losses need them


@dataclass(frozen=True)
class Address:
    """Holds the fields of a forward_backward body that are read before it is stored."""

    model_id: str
    seq_id: int  # 0: not set
    forward_only: bool  # no gradient is wanted
    loss_fn: str


@dataclass(frozen=True)
class ForwardBackwardRequest(Address):
    """Holds the body of forward_backward."""

    data: list[Datum]
    loss_config: dict[str, float | str]


class _Unusable(Exception):
    """A datum cannot be used."""


_UNKNOWN = "a field of number {}, which this server does not know; leave it out, or use an older SDK"


def decode_address(body: bytes) -> Address:
    """Read where a forward_backward body belongs. Raises InvalidRequest when the bytes do not parse."""
    return Address(*_address(_parse(body)))


def decode_forward_backward(body: bytes) -> ForwardBackwardRequest:
    """Read a forward_backward body. Raises InvalidRequest for bytes that do not parse, and for a newer field.

    What is wrong with a datum is said in it.
    """
    message = _parse(body)
    number = unknown_fields.number_in(message)
    if number is not None:
        raise InvalidRequest(f"the request has {_UNKNOWN.format(number)}")
    return ForwardBackwardRequest(*_address(message), list(_datums(message.data)), _loss_config(message))


def _address(message: pb.ForwardBackwardRequest) -> tuple[str, int, bool, str]:
    return message.model_id, message.seq_id, message.forward_only, message.loss_fn


def encode_forward_backward_output(
    logprobs: Sequence[np.ndarray], metrics: dict[str, float], losses: Sequence[np.ndarray] | None = None
) -> bytes:
    """Write what each datum gets, in datum order, and the metrics.

    These are float32 ``logprobs`` [N] or [N, K] and, unless it is None, ``elementwise_loss`` [N].
    """
    output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    numbers = range(len(logprobs))
    for trailing_shape, group in groupby(numbers, key=lambda number: logprobs[number].shape[1:]):
        ours = list(group)
        fields = {"logprobs": _tensors([logprobs[number] for number in ours], trailing_shape)}
        if losses is not None:
            fields["elementwise_loss"] = _tensors([losses[number] for number in ours], ())
        output.loss_fn_outputs.append(
            pb.ArrayRecord(type_tag="ArrayRecord", fields=fields, num_datums=len(ours))
        )
    return output.SerializeToString(deterministic=True)


def _parse(body: bytes) -> pb.ForwardBackwardRequest:
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise InvalidRequest(
            f"the body of {len(body)} bytes is not a protobuf ForwardBackwardRequest; "
            "send one, or JSON with the content type application/json"
        ) from None
    return message


def _loss_config(message: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    return {
        key: value.text if value.WhichOneof("value") == "text" else value.number
        for key, value in message.loss_fn_config_v2.items()
    }


def _datums(messages: Iterable[pb.Datum]) -> Iterator[Datum]:
    elements_left, image_tokens_left = MAX_ELEMENTS, MAX_IMAGE_TOKENS
    for message in messages:
        image_tokens_left -= sum(chunk.image.stored.tokens for chunk in message.model_input)
        if image_tokens_left < 0:
            yield _unusable(TOO_MANY_IMAGE_TOKENS)
            continue
        elements_left -= sum(_sparse_elements(tensor) for tensor in message.loss_fn_inputs.values())
        yield (
            _datum(message)
            if elements_left >= 0
            else _unusable(
                f"with it, the sparse tensors of this request stand for more than {MAX_ELEMENTS} elements; "
                "send fewer datums at once"
            )
        )


def _datum(datum: pb.Datum) -> Datum:
    try:
        _check_known("it", datum)
        tokens, images = _tokens(datum)
        loss_inputs = {name: _tensor(name, tensor) for name, tensor in datum.loss_fn_inputs.items()}
    except _Unusable as problem:
        return _unusable(str(problem))
    try:
        spans = _spans("model_input_spans", datum.model_input_spans, len(tokens))
        target_spans = _spans("loss_fn_input_spans", datum.loss_fn_input_spans, len(tokens))
    except _Unusable as problem:
        return Datum(tokens, loss_inputs, images=images, span_problem=str(problem))
    return Datum(tokens, loss_inputs, images=images, spans=spans, target_spans=target_spans)


def _unusable(problem: str) -> Datum:
    return Datum(np.zeros(0, np.int32), {}, problem)


def _spans(name: str, messages: Iterable[pb.ProvenanceSpan], length: int) -> tuple[TokenSpan, ...]:
    spans = []
    for message in messages:
        kind = message.WhichOneof("span")
        span = message.sampled_tokens if kind == "sampled_tokens" else message.prompt_tokens
        _check_known(f"a span of its {name}", message)
        if span.length:  # empty spans say nothing, and there could be millions
            spans.append(TokenSpan(span.sequence_id, kind == "sampled_tokens", span.offset, span.length))
    covered = sum(span.length for span in spans)
    if spans and (covered != length or any(span.offset < 0 or span.length < 0 for span in spans)):
        raise _Unusable(
            f"its {name} cover {covered} tokens and model_input has {length}; they must tile it, "
            "one after the other"
        )
    return tuple(spans)


def _tokens(datum: pb.Datum) -> tuple[np.ndarray, tuple[PlacedImage, ...]]:
    pieces, images, length = [np.zeros(0, np.int32)], list[PlacedImage](), 0
    for chunk in datum.model_input:
        _check_known("a chunk of its model_input", chunk)
        kind = chunk.WhichOneof("chunk")
        if kind == "image" and chunk.image.HasField("stored"):
            stored = chunk.image.stored
            if stored.problem:
                raise _Unusable(f"an image of its model_input cannot be used: {stored.problem}")
            images.append(PlacedImage(length, stored.tokens, stored.digest))
            pieces.append(np.zeros(stored.tokens, np.int32))
        elif kind == "encoded_text":
            _check_known("a chunk of its model_input", chunk.encoded_text)
            pieces.append(_array("model_input tokens", chunk.encoded_text.tokens, _INT32))
        else:
            raise _Unusable(
                f"its model_input holds a chunk of kind {kind or 'unknown'!r}; send encoded_text chunks, "
                "and to models that see image chunks with the file itself: images are never fetched, and "
                "audio is not taken"
            )
        length += len(pieces[-1])
    return np.concatenate(pieces).astype(np.int32, copy=False), tuple(images)


def _check_known(what: str, message: Message) -> None:
    number = unknown_fields.number_in(message)
    if number is not None:
        raise _Unusable(f"{what} has {_UNKNOWN.format(number)}")


def _tensor(name: str, tensor: pb.Tensor) -> np.ndarray:
    _check_known(name, tensor)
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise _Unusable(f"{name} has dtype number {tensor.dtype}; send float32 or int64")
    shape = _shape(name, tensor)
    if tensor.WhichOneof("encoding") == "sparse_csr":
        return _densify(name, tensor.sparse_csr, dtype, shape)
    values = _widen(_array(name, tensor.dense, dtype), dtype)
    if not shape:
        return values
    if values.size != math.prod(shape):
        raise _Unusable(
            f"{name} holds {values.size} values, but its shape {list(shape)} wants {math.prod(shape)}"
        )
    return values.reshape(shape)


def _shape(name: str, tensor: pb.Tensor) -> tuple[int, ...]:
    """The shape that a tensor claims. Each size is checked, since a 0 beside it hides a huge one."""
    if len(tensor.shape) > MAX_RANK:
        raise _Unusable(f"{name} claims {len(tensor.shape)} dimensions; at most {MAX_RANK} are allowed")
    shape = tuple(tensor.shape)
    if not all(0 <= size <= MAX_ELEMENTS for size in shape) or math.prod(shape) > MAX_ELEMENTS:
        raise _Unusable(f"{name} claims the shape {list(shape)}; at most {MAX_ELEMENTS} elements are allowed")
    return shape


def _sparse_elements(tensor: pb.Tensor) -> int:
    """How many elements a sparse tensor has when dense; 0 for a shape that is refused later."""
    if tensor.WhichOneof("encoding") != "sparse_csr":
        return 0
    try:
        return math.prod(_shape("", tensor))
    except _Unusable:
        return 0


def _densify(name: str, csr: pb.SparseCsr, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Make a sparse matrix dense; unlisted cells are 0."""
    if len(shape) != 2:
        raise _Unusable(f"{name} is sparse with shape {list(shape)}; a sparse tensor has two dimensions")
    values = _widen(_array(name, csr.values, dtype), dtype)
    starts = _array(f"{name} crow_indices", csr.crow_indices, _INT64)
    columns = _array(f"{name} col_indices", csr.col_indices, _INT64)
    is_inside = bool(((starts >= 0) & (starts <= values.size)).all())  # so no difference overflows
    counts = np.diff(starts)
    is_consistent = (
        starts.size == shape[0] + 1
        and is_inside
        and values.size == columns.size
        and starts[0] == 0
        and starts[-1] == values.size
        and bool((counts >= 0).all())
        and bool(((columns >= 0) & (columns < shape[1])).all())
    )
    if not is_consistent:
        raise _Unusable(
            f"{name} is sparse, and its indices do not fit its shape {list(shape)} and {values.size} values"
        )
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def _array(name: str, buffer: bytes, dtype: np.dtype) -> np.ndarray:
    if len(buffer) % dtype.itemsize:
        raise _Unusable(f"{name} has {len(buffer)} bytes, not a multiple of {dtype.itemsize}")
    return np.frombuffer(buffer, dtype)


def _widen(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Widen the four dtypes of the wire to two: float32 and int64."""
    if dtype == _INT32:
        return array.astype(np.int64)
    if dtype.kind == "u":  # bfloat16 is the upper half of a float32
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


def _tensors(arrays: list[np.ndarray], trailing_shape: tuple[int, ...]) -> pb.BatchedTensor:
    pieces = [np.ascontiguousarray(array, _FLOAT32).tobytes() for array in arrays]
    offsets = np.cumsum([0, *map(len, pieces)], dtype=_INT64)
    return pb.BatchedTensor(
        data=b"".join(pieces),
        offsets=offsets.tobytes(),
        dtype=pb.DTYPE_FLOAT32,
        trailing_shape=trailing_shape,
    )
