from typing import Any

import msgspec
import pytest

from spmd_tx.coordinator.wire import tinker_pb2 as pb
from spmd_tx.coordinator.wire import unknown_fields
from spmd_tx.coordinator.wire.training_protobuf import decode_forward_backward
from spmd_tx.errors import InvalidRequest


class Cat(msgspec.Struct, tag="cat"):
    name: str = ""


class Dog(msgspec.Struct, tag="dog"):
    size: int = 0


class Box(msgspec.Struct):
    pet: Cat | Dog | None = None
    boxes: list["Box"] | None = None
    labels: dict[str, Any] = {}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"pet": None, "boxes": None},
        {"pet": {"type": "dog", "size": 1}, "boxes": [{"boxes": []}]},
        {"labels": {"of": {"any": "kind"}}, "type": "box"},
        {"newer": None, "newest": False, "a": 0, "b": 0.0, "c": "", "d": [], "e": {}},
    ],
)
def test_what_is_known_or_asks_for_nothing_is_taken(body):
    unknown_fields.check_json(body, Box)


@pytest.mark.parametrize(
    "body, place, known",
    [
        ({"pets": {"type": "dog"}}, "pets", "boxes, labels, pet"),
        ({"pet": {"type": "dog", "name": "a"}}, "pet.name", "size"),
        ({"pet": {"type": "cat", "size": 1}}, "pet.size", "name"),
        ({"boxes": [{}, {"boxes": [{"x": True}]}]}, "boxes[1].boxes[0].x", "boxes, labels, pet"),
    ],
)
def test_what_is_not_known_is_named_with_what_is(body, place, known):
    with pytest.raises(InvalidRequest) as refusal:
        unknown_fields.check_json(body, Box)
    assert str(refusal.value) == f"{place} is not known to this server; leave it out. Known: {known}"


def test_a_long_name_is_cut():
    with pytest.raises(InvalidRequest) as refusal:
        unknown_fields.check_json({"x" * 10_000: 1}, Box)
    assert len(str(refusal.value)) < 300


NEWER = bytes([15 << 3 | 5]) + b"\1\0\0\0"  # a field of number 15


def batch() -> pb.ForwardBackwardRequest:
    targets = pb.Tensor(dtype=pb.DTYPE_INT64, shape=[1], dense=bytes(8))
    chunk = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=bytes(4)))
    span = pb.ProvenanceSpan(prompt_tokens=pb.SequenceSpan(length=1))
    datum = pb.Datum(model_input=[chunk], loss_fn_inputs={"target_tokens": targets}, model_input_spans=[span])
    return pb.ForwardBackwardRequest(model_id="m", seq_id=1, data=[datum], loss_fn="cross_entropy")


def test_a_request_with_a_newer_field_of_protobuf_is_refused_by_its_number():
    with pytest.raises(InvalidRequest, match="the request has a field of number 15"):
        decode_forward_backward(batch().SerializeToString() + NEWER)


@pytest.mark.parametrize(
    "part, problem",
    [
        (lambda datum: datum, "it has a field of number 15"),
        (lambda datum: datum.model_input[0], "a chunk of its model_input has a field of number 15"),
        (lambda datum: datum.model_input[0].encoded_text, "a chunk of its model_input has a field of"),
        (lambda datum: datum.loss_fn_inputs["target_tokens"], "target_tokens has a field of number 15"),
    ],
    ids=["datum", "chunk", "tokens", "tensor"],
)
def test_a_datum_with_a_newer_field_cannot_be_used(part, problem):
    request = batch()
    part(request.data[0]).MergeFromString(NEWER)
    (datum,) = decode_forward_backward(request.SerializeToString()).data
    assert datum.problem is not None
    assert datum.problem.startswith(problem)
    (datum,) = decode_forward_backward(batch().SerializeToString()).data
    assert datum.problem is None


def test_a_span_with_a_newer_field_is_not_used():
    request = batch()
    request.data[0].model_input_spans[0].MergeFromString(NEWER)
    (datum,) = decode_forward_backward(request.SerializeToString()).data
    assert datum.span_problem is not None
    assert "a field of number 15" in datum.span_problem
