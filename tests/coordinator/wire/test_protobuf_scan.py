import numpy as np
import pytest
import zstandard

from spmd_tx.coordinator.wire import tinker_pb2 as pb
from spmd_tx.coordinator.wire.protobuf_scan import HARMLESS_BYTES, MAX_FIELDS, check_fields
from spmd_tx.errors import InvalidRequest


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field."""
    size, length = len(content), b""
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


DATA = pb.ForwardBackwardRequest.DESCRIPTOR.fields_by_name["data"].number
EMPTY_DATUMS = field(DATA, b"") * (1 << 20)
EMPTY_CHUNKS = field(DATA, field(1, b"") * (1 << 20))
MANY_OF_FEW = field(DATA, field(1, b"") * 1000) * 1000


@pytest.mark.parametrize("body", [EMPTY_DATUMS, EMPTY_CHUNKS, MANY_OF_FEW], ids=["datums", "chunks", "both"])
def test_a_body_of_nothing_but_messages_is_refused_unparsed(body):
    with pytest.raises(InvalidRequest, match=f"more than {MAX_FIELDS} datums and pieces"):
        check_fields(body)


def test_what_small_bodies_hold_is_left_to_the_parser():
    check_fields(EMPTY_DATUMS[:HARMLESS_BYTES])


def test_a_large_batch_has_few_fields():
    tokens, values = np.zeros(500, "<i4").tobytes(), np.zeros(500, "<f4").tobytes()
    datum = pb.Datum(model_input=[pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=tokens))])
    for name in ("target_tokens", "weights", "logprobs", "advantages"):
        datum.loss_fn_inputs[name].CopyFrom(pb.Tensor(dense=values, shape=[500], dtype=pb.DTYPE_FLOAT32))
    body = pb.ForwardBackwardRequest(model_id="m", seq_id=1, data=[datum] * 4096).SerializeToString()
    assert len(body) > HARMLESS_BYTES
    check_fields(body)


@pytest.mark.parametrize(
    "end", [b"", b"\x1a", b"\xff" * 20, b"\x1a\xff\xff\xff\xff\x7f", b"\x09", b"\x0d\x00"]
)
def test_what_is_no_protobuf_is_left_to_the_parser(end):
    check_fields(field(4, bytes(HARMLESS_BYTES)) + end)


def test_groups_are_refused_since_they_hide_what_follows():
    with pytest.raises(InvalidRequest, match="groups"):
        check_fields(b"\x7b\x7c" + EMPTY_DATUMS)


async def test_a_small_request_that_unpacks_to_messages_is_refused(api, services):
    body = zstandard.ZstdCompressor().compress(EMPTY_DATUMS)
    headers = {"content-type": "application/x-protobuf", "content-encoding": "zstd"}
    response = await api.post("forward_backward", content=body, headers=headers)
    assert (len(body) < 1000, response.status_code) == (True, 400)
    assert "send fewer datums" in response.json()["detail"]
