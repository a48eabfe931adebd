"""Whatever stands in the body of a forward_backward, it is packed, or refused with a reason."""

import math
import os
from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from spmd_tx.coordinator.training.attention_cost import AttentionCost
from spmd_tx.coordinator.training.batching import pack
from spmd_tx.coordinator.training.losses import LOSSES
from spmd_tx.coordinator.training.packing import TrainingShapes
from spmd_tx.coordinator.training.validation import check_forward_backward, with_ones
from spmd_tx.coordinator.wire import tinker_pb2 as pb
from spmd_tx.coordinator.wire.limits import Limits
from spmd_tx.coordinator.wire.training_protobuf import Datum, decode_address, decode_forward_backward
from spmd_tx.errors import RequestError

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))  # of each test; `make fuzz` wants more
LIMITS = Limits(vocab_size=512, max_context=128, max_rank=16)
SHAPES = TrainingShapes(1, 256, (128,), 128, AttentionCost(5e-4))
NAMES = [*LOSSES, "custom", "nonsense"]
INPUTS = (
    *("target_tokens", "weights", "logprobs", "advantages", "sequence_ratio_mask"),
    *("clip_low_threshold", "clip_high_threshold", "mask", "\xf6"),
)
WANTED = {name: (*entry.needed, *entry.else_ones) for name, entry in LOSSES.items()}
SETTINGS = "clip_low_threshold clip_high_threshold beta kl_coeff nonsense".split()
DTYPES = {pb.DTYPE_FLOAT32: "<f4", pb.DTYPE_INT64: "<i8", pb.DTYPE_INT32: "<i4"}

fuzzed = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=EXAMPLES == 60
)

anything = st.binary(max_size=64)
numbers = st.floats(allow_nan=True, allow_infinity=True, width=32) | st.integers(-5, 600).map(float)
sizes = st.integers(-2, 9) | st.sampled_from([0, 2**26, 2**31, 2**62, 2**63 - 1, -(2**63)])


@st.composite
def tensors(draw, length: int) -> pb.Tensor:
    """Mostly as long as its tokens; perhaps with a second dimension, sparse, or of nonsense."""
    tensor = pb.Tensor(dtype=draw(st.sampled_from([*DTYPES, *DTYPES, pb.DTYPE_BFLOAT16, 0, 77])))
    columns = draw(st.sampled_from([0, 0, 0, 1, 3]))
    count = draw(st.sampled_from([length] * 8 + [0, length + 1])) * max(columns, 1)
    values = np.array(draw(st.lists(numbers, min_size=count, max_size=count)), np.float64)
    with np.errstate(all="ignore"):
        raw = np.nan_to_num(values, posinf=9.0).astype(DTYPES.get(tensor.dtype, "<f4")).tobytes()
        if tensor.dtype == pb.DTYPE_FLOAT32:
            raw = values.astype("<f4").tobytes()
    shape = [count // max(columns, 1), columns] if columns else [count]
    tensor.shape.extend(draw(st.sampled_from([shape] * 6 + [[], [1] * 65]) | st.lists(sizes, max_size=3)))
    if draw(st.integers(0, 5)):
        tensor.dense = raw if draw(st.integers(0, 9)) else draw(anything)
    else:
        rows = [round(count * row / max(length, 1)) for row in range(length + 1)]
        tensor.sparse_csr.values = raw
        odd = st.lists(sizes, max_size=5).map(lambda starts: np.array([0, *starts, count], "<i8").tobytes())
        tensor.sparse_csr.crow_indices = (
            np.array(rows, "<i8").tobytes() if draw(st.booleans()) else draw(anything | odd)
        )
        columns_of = draw(st.lists(st.integers(-1, 600), min_size=count, max_size=count))
        tensor.sparse_csr.col_indices = np.array(columns_of, "<i8").tobytes()
    return tensor


def good(name: str, length: int) -> pb.Tensor:
    """What a loss wants."""
    if name == "target_tokens":
        return pb.Tensor(dtype=pb.DTYPE_INT64, shape=[length], dense=np.arange(length, dtype="<i8").tobytes())
    values = np.linspace(-1, 0, length, dtype="<f4")
    return pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[length], dense=values.tobytes())


@st.composite
def datums(draw, loss: str) -> pb.Datum:
    """Half of the time in order, but for the tokens."""
    datum = pb.Datum()
    if draw(st.booleans()):
        length = draw(st.sampled_from([1, 5, 128, 129]))
        tokens = np.array(draw(st.lists(st.integers(0, 511), min_size=length, max_size=length)), "<i4")
        datum.model_input.add().encoded_text.tokens = tokens.tobytes()
        for name in WANTED.get(loss, WANTED["ppo"]):
            datum.loss_fn_inputs[name].CopyFrom(good(name, length))
        return datum
    length = draw(st.sampled_from([1, 2, 5, 5, 5, 0, 128, 129]))
    tokens = draw(st.lists(st.integers(-1, 512) | st.integers(0, 511), min_size=length, max_size=length))
    chunk = datum.model_input.add()
    match draw(st.integers(0, 12)):
        case 0:
            chunk.image.data = draw(anything)
        case 1:
            chunk.encoded_text.tokens = draw(anything)
        case 2:
            pass
        case 3:
            chunk.image.stored.digest = draw(st.text(max_size=40))
            chunk.image.stored.tokens = draw(st.sampled_from([0, 1, 2**32 - 1]))
        case _:
            chunk.encoded_text.tokens = np.array(tokens, "<i4").tobytes()
    for name in draw(st.lists(st.sampled_from(INPUTS), unique=True)):
        datum.loss_fn_inputs[name].CopyFrom(draw(tensors(length)))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        span = draw(st.sampled_from([datum.model_input_spans, datum.loss_fn_input_spans])).add()
        sequence = span.sampled_tokens if draw(st.booleans()) else span.prompt_tokens
        sequence.sequence_id, sequence.offset = draw(st.text(max_size=40)), draw(sizes)
        sequence.length = draw(sizes)
    return datum


@st.composite
def bodies(draw) -> bytes:
    loss = draw(st.text(max_size=5)) if draw(st.integers(0, 9)) == 9 else draw(st.sampled_from(NAMES))
    request = pb.ForwardBackwardRequest(
        model_id=draw(st.sampled_from(["s:train:0"] * 3 + [""]) | st.text(max_size=9)),
        seq_id=draw(st.sampled_from([1, 2**31 - 1, 1, 0, -1])),
        data=draw(st.lists(datums(loss), max_size=3)),
        loss_fn=loss,
        forward_only=draw(st.booleans()),
    )
    most = draw(st.sampled_from([0, 0, 3]))
    for name in draw(st.lists(st.sampled_from(SETTINGS), unique=True, max_size=most)):
        if draw(st.booleans()):
            request.loss_fn_config[name] = draw(numbers)
        elif draw(st.booleans()):
            request.loss_fn_config_v2[name].number = draw(numbers)
        else:
            request.loss_fn_config_v2[name].text = draw(st.text(max_size=9))
    return request.SerializeToString()


@st.composite
def damaged(draw) -> bytes:
    """A body of which some bytes were changed, lost or repeated."""
    body = bytearray(draw(bodies()))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(len(body) - 1, 0)))
        match draw(st.integers(0, 2)):
            case 0 if body:
                body[place] = draw(st.integers(0, 255))
            case 1:
                del body[place:]
            case _:
                body[place:place] = draw(anything)
    return bytes(body)


def with_recorded(data: list[Datum]) -> list[Datum]:
    """The datums with log-probabilities, in place of those that the server has recorded while sampling."""
    recorded = [{"logprobs": np.zeros(len(datum.tokens), np.float32)} for datum in data]
    return [
        replace(datum, loss_inputs=datum.loss_inputs | own) for datum, own in zip(data, recorded, strict=True)
    ]


def take(body: bytes) -> bool:
    """What is done with a body before it reaches the workers; whether it does."""
    try:
        decode_address(body)
        request = with_ones(decode_forward_backward(body))
        loss = check_forward_backward(request, LIMITS)
        data = with_recorded(request.data) if loss.name == "stable_reinforce" else request.data
        packed = pack(data, loss, request.forward_only, SHAPES, [])
    except RequestError:
        return False
    tokens = np.concatenate([chunk.rows.tokens.ravel() for chunk in packed.chunks])
    assert ((tokens >= 0) & (tokens < LIMITS.vocab_size)).all()
    assert all(math.prod(chunk.rows.tokens.shape) <= SHAPES.train_tokens for chunk in packed.chunks)
    return True


@fuzzed
@given(bodies())
def test_a_body_of_nonsense_is_packed_or_refused(body):
    take(body)


@fuzzed
@given(damaged())
def test_a_damaged_body_is_packed_or_refused(body):
    take(body)


@fuzzed
@given(st.binary(max_size=400))
def test_bytes_are_packed_or_refused(body):
    take(body)


def test_the_bodies_are_not_all_refused():
    many = settings(fuzzed, max_examples=2000, database=None, phases=[Phase.generate])
    find(bodies(), take, settings=many)
