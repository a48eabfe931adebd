"""The JSON forms of forward, forward_backward and results, for SDKs before 0.25.

Everything else, also the log, uses protobuf: requests are converted on arrival, results when they are sent.
"""

import base64
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from spmd_tx.coordinator.wire import tinker_pb2 as pb
from spmd_tx.coordinator.wire.fields import TensorData, TrainingNumber
from spmd_tx.coordinator.wire.sampling import ModelInputChunk
from spmd_tx.coordinator.wire.sampling_protobuf import NO_LOGPROB
from spmd_tx.coordinator.wire.training_protobuf import JSON, MAX_ELEMENTS, MAX_RANK, PROTOBUF, Address
from spmd_tx.errors import InvalidRequest

MAX_SEQ_ID = 2**31 - 1  # in the protobuf form

_DTYPES = {"float32": (pb.DTYPE_FLOAT32, "<f4"), "int64": (pb.DTYPE_INT64, "<i8")}
_LAST_INTEGER = {"<i4": 2**31 - 1, "<i8": 2**53}  # that both the type and JSON hold exactly
_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


class JsonChunk(ModelInputChunk, frozen=True, forbid_unknown_fields=True):
    type: str | None = None  # the contents say it


class JsonModelInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    chunks: list[JsonChunk]


class JsonTensor(TensorData, frozen=True, forbid_unknown_fields=True):
    pass


class JsonDatum(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model_input: JsonModelInput
    loss_fn_inputs: dict[str, JsonTensor] = {}


_datums = msgspec.json.Decoder(JsonDatum)


class JsonLossInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    data: list[msgspec.Raw]  # JsonDatum, decoded one by one: many at once would keep other threads waiting
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class LossRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Is the body of /forward or /forward_backward."""

    model_id: str
    seq_id: TrainingNumber
    forward_input: JsonLossInput | None = None
    forward_backward_input: JsonLossInput | None = None
    type: str | None = None  # the route says it


def to_protobuf(request: LossRequest, forward_only: bool) -> tuple[Address, bytes]:
    """Convert a request. Invalid numbers stay invalid and fail its future. Raises DecodeError, too."""
    name = "forward_input" if forward_only else "forward_backward_input"
    loss: JsonLossInput | None = getattr(request, name)
    if loss is None:
        raise InvalidRequest(f"the body has no {name}; send data and loss_fn in it")
    if request.seq_id > MAX_SEQ_ID:
        raise InvalidRequest(f"seq_id is {request.seq_id}; it must be at most {MAX_SEQ_ID}")
    message = pb.ForwardBackwardRequest(
        model_id=request.model_id,
        seq_id=request.seq_id,
        data=[_datum(_decoded(datum, f"$.{name}.data[{index}]")) for index, datum in enumerate(loss.data)],
        loss_fn=loss.loss_fn,
        forward_only=forward_only,
    )
    for key, value in (loss.loss_fn_config or {}).items():
        field = "text" if isinstance(value, str) else "number"
        setattr(message.loss_fn_config_v2[key], field, value)
    address = Address(request.model_id, request.seq_id, forward_only, loss.loss_fn)
    return address, message.SerializeToString(deterministic=True)


def is_wanted(accept: str) -> bool:
    """Return whether a client with this Accept header needs JSON."""
    return JSON in accept and PROTOBUF not in accept


def from_protobuf(kind: str, result: bytes) -> bytes:
    """Convert the result of a request of this kind to JSON."""
    if kind == "sample":
        return msgspec.json.encode(_sample_result(pb.SampleResponse.FromString(result)))
    return msgspec.json.encode(_loss_result(pb.ForwardBackwardOutput.FromString(result)))


def _decoded(datum: msgspec.Raw, path: str) -> JsonDatum:
    try:
        return _datums.decode(datum)
    except msgspec.ValidationError as error:
        problem, _, within = str(error).partition(" - at `$")
        raise msgspec.ValidationError(f"{problem} - at `{path}{within or '`'}") from None


def _datum(datum: JsonDatum) -> pb.Datum:
    chunks = [_chunk(chunk) for chunk in datum.model_input.chunks]
    inputs = {name: _tensor(tensor) for name, tensor in datum.loss_fn_inputs.items()}
    return pb.Datum(model_input=chunks, loss_fn_inputs=inputs)


def _chunk(chunk: ModelInputChunk) -> pb.Chunk:
    match chunk.kind:
        case "encoded_text":
            return pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=_bytes(chunk.tokens or [], "<i4")))
        case "image":
            image = pb.ImageChunk(data=_base64(chunk.data), format=chunk.format or "")
            if chunk.expected_tokens is not None:
                image.expected_tokens = min(max(chunk.expected_tokens, -1), MAX_ELEMENTS)
            return pb.Chunk(image=image)
        case "dmel":
            return pb.Chunk(dmel=pb.DmelChunk(dmel=_base64(chunk.dmel)))
        case "image_asset_pointer" | "stored_image" | "unknown":
            return pb.Chunk()


def _tensor(tensor: TensorData) -> pb.Tensor:
    number, dtype = _DTYPES.get(tensor.dtype, (pb.DTYPE_UNSPECIFIED, "<f4"))
    if number == pb.DTYPE_INT64 and not all(value.is_integer() for value in tensor.data):
        number, dtype = _DTYPES["float32"]  # refused where integers are needed
    values = _bytes(tensor.data, dtype)
    starts, columns = tensor.sparse_crow_indices, tensor.sparse_col_indices
    shape = None if tensor.shape is None else _sizes(tensor.shape)
    if starts is None and columns is None:
        return pb.Tensor(dense=values, dtype=number, shape=shape)
    csr = pb.SparseCsr(
        values=values, crow_indices=_bytes(starts or [], "<i8"), col_indices=_bytes(columns or [], "<i8")
    )
    return pb.Tensor(sparse_csr=csr, dtype=number, shape=shape)


def _sizes(shape: list[int]) -> list[int]:
    """Clip sizes to what protobuf can hold; invalid ones stay invalid."""
    return [max(-1, min(size, MAX_ELEMENTS + 1)) for size in shape[: MAX_RANK + 1]]


def _bytes(values: list[int] | list[float], dtype: str) -> bytes:
    """Encode numbers, clipped to the range of the type; its ends are never valid values."""
    array = np.asarray(values)
    if dtype == "<f4":
        with np.errstate(over="ignore"):
            return array.astype(dtype).tobytes()
    end = _LAST_INTEGER[dtype]
    if array.dtype == object:  # integers beyond 64 bits, perhaps beyond floats
        array = np.asarray([max(-end, min(value, end)) for value in values])
    return np.clip(array.astype(np.float64), -end, end).astype(dtype).tobytes()


def _base64(text: str | None) -> bytes:
    try:
        return base64.b64decode(text or "", validate=True)
    except ValueError:
        return b""


def _loss_result(output: pb.ForwardBackwardOutput) -> dict[str, Any]:
    outputs: list[dict[str, Any]] = []
    for record in output.loss_fn_outputs:
        columns = {name: _datum_arrays(tensor) for name, tensor in record.fields.items()}
        for place in range(record.num_datums):
            outputs.append({name: _tensor_json(arrays[place]) for name, arrays in columns.items()})
    return {
        "loss_fn_output_type": output.loss_fn_output_type,
        "loss_fn_outputs": outputs,
        "metrics": {name: _number(value) for name, value in output.metrics.items()},
    }


def _datum_arrays(tensor: pb.BatchedTensor) -> list[np.ndarray]:
    ends = np.frombuffer(tensor.offsets, "<i8")
    shape = (-1, *tensor.trailing_shape)
    return [np.frombuffer(tensor.data[start:end], "<f4").reshape(shape) for start, end in pairwise(ends)]


def _tensor_json(array: np.ndarray) -> dict[str, Any]:
    values = array.ravel().tolist()
    if not np.isfinite(array).all():
        values = [_number(value) for value in values]
    return {"data": values, "dtype": "float32", "shape": list(array.shape)}


def _number(value: float) -> float | str:
    """Write non-finite numbers, which JSON lacks, as the words that SDKs read."""
    return value if np.isfinite(value) else _NOT_FINITE[repr(value)]


def _sample_result(response: pb.SampleResponse) -> dict[str, Any]:
    result: dict[str, Any] = {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": "length" if sequence.stop_reason == pb.STOP_REASON_LENGTH else "stop",
                "tokens": np.frombuffer(sequence.tokens, "<i4").tolist(),
                "logprobs": np.frombuffer(sequence.logprobs, "<f4").tolist(),
            }
            for sequence in response.sequences
        ],
    }
    if response.HasField("prompt_logprobs"):
        # NaN means no value and becomes null.
        result["prompt_logprobs"] = np.frombuffer(response.prompt_logprobs, "<f4").tolist()
    if response.HasField("topk_prompt_logprobs"):
        result["topk_prompt_logprobs"] = list(_candidates(response.topk_prompt_logprobs))
    return result


def _candidates(topk: pb.TopkLogprobs) -> Iterable[list[tuple[int, float]] | None]:
    """Yield the candidates of each position; None where nothing was computed."""
    ids = np.frombuffer(topk.token_ids, "<i4").reshape(topk.length, topk.k)
    logprobs = np.frombuffer(topk.logprobs, "<f4").reshape(topk.length, topk.k)
    for row_ids, row_logprobs in zip(ids.tolist(), logprobs.tolist(), strict=True):
        row = [pair for pair in zip(row_ids, row_logprobs, strict=True) if pair[1] != NO_LOGPROB]
        yield row or None
