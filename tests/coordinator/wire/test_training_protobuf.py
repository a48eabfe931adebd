import numpy as np
import pytest
from tinker.proto import tinker_public_pb2 as sdk
from tinker.proto.response_conv import deserialize_forward_backward_output

from spmd_tx.coordinator.wire import tinker_pb2, training_protobuf
from spmd_tx.errors import InvalidRequest

# One message of ours stands for two of the SDK's that are alike.
SDK_NAMES = {"SequenceSpan": "PromptProvenanceSpan"}


def dense(values, dtype, code, shape=None):
    array = np.asarray(values, dtype)
    return sdk.Tensor(dense=array.tobytes(), dtype=code, shape=array.shape if shape is None else shape)


def csr(values, crow, col, shape, dtype=np.int64, code=sdk.DTYPE_INT64):
    return sdk.Tensor(
        sparse_csr=sdk.SparseCsr(
            values=np.asarray(values, dtype).tobytes(),
            crow_indices=np.asarray(crow, np.int64).tobytes(),
            col_indices=np.asarray(col, np.int64).tobytes(),
        ),
        dtype=code,
        shape=shape,
    )


def text(tokens):
    return sdk.Chunk(encoded_text=sdk.EncodedTextChunk(tokens=np.asarray(tokens, np.int32).tobytes()))


def decode_datum(*chunks, **loss_inputs):
    datum = sdk.Datum(model_input=chunks or [text([1, 2, 3])], loss_fn_inputs=loss_inputs)
    body = sdk.ForwardBackwardRequest(model_id="m", seq_id=1, data=[datum])
    return training_protobuf.decode_forward_backward(body.SerializeToString()).data[0]


# What the log keeps beside what clients read, in the same message.
ADDED = {"SampledSequence": {"forced"}, "ImageChunk": {"stored"}}
MESSAGES = [name for name in tinker_pb2.DESCRIPTOR.message_types_by_name if name != "StoredImage"]


@pytest.mark.parametrize("name", MESSAGES)
def test_every_field_has_the_number_and_type_of_the_sdk(name):
    ours = tinker_pb2.DESCRIPTOR.message_types_by_name[name]
    theirs = sdk.DESCRIPTOR.message_types_by_name[SDK_NAMES.get(name, name)]

    def fields(message):
        return {f.name: (f.number, f.type, f.is_repeated, f.has_presence) for f in message.fields}

    added = {f.name: f.number for f in ours.fields if f.name not in theirs.fields_by_name}
    assert added.keys() == ADDED.get(name, set())
    assert all(number >= 100 for number in added.values()), "which the SDK may take for something else"
    assert {key: field for key, field in fields(ours).items() if key not in added} == fields(theirs)


def test_what_claims_to_be_of_the_log_takes_little_memory():
    stored = tinker_pb2.StoredImage(digest="00", tokens=2**32 - 1)
    datum = tinker_pb2.Datum(model_input=[tinker_pb2.Chunk(image=tinker_pb2.ImageChunk(stored=stored))])
    body = tinker_pb2.ForwardBackwardRequest(data=[datum]).SerializeToString()
    (read,) = training_protobuf.decode_forward_backward(body).data
    assert "images of this request have more than 4194304 tokens" in (read.problem or "")


def test_a_request_is_read_whole():
    datum = sdk.Datum(
        model_input=[text([1, 2]), text([3])],
        loss_fn_inputs={
            "target_tokens": dense([2, 3, 4], np.int64, sdk.DTYPE_INT64),
            "weights": dense([0.0, -1.5, 1.0], np.float32, sdk.DTYPE_FLOAT32),
        },
    )
    body = sdk.ForwardBackwardRequest(
        model_id="s:train:0", seq_id=7, data=[datum, datum], loss_fn="cross_entropy", forward_only=True
    ).SerializeToString()

    request = training_protobuf.decode_forward_backward(body)

    assert (request.model_id, request.seq_id, request.forward_only) == ("s:train:0", 7, True)
    assert request.loss_fn == "cross_entropy"
    assert len(request.data) == 2
    np.testing.assert_array_equal(request.data[1].tokens, np.array([1, 2, 3], np.int32), strict=True)
    np.testing.assert_array_equal(
        request.data[1].loss_inputs["target_tokens"], np.array([2, 3, 4]), strict=True
    )
    np.testing.assert_array_equal(
        request.data[1].loss_inputs["weights"], np.array([0.0, -1.5, 1.0], np.float32), strict=True
    )
    assert training_protobuf.decode_address(body) == training_protobuf.Address(
        "s:train:0", 7, True, "cross_entropy"
    )


def test_the_second_loss_config_wins_over_the_first():
    body = sdk.ForwardBackwardRequest(
        model_id="m",
        loss_fn_config={"beta": 0.1},
        loss_fn_config_v2={"beta": sdk.LossConfigValue(number=0.2), "loss_id": sdk.LossConfigValue(text="x")},
    )
    assert training_protobuf.decode_forward_backward(body.SerializeToString()).loss_config == {
        "beta": 0.2,
        "loss_id": "x",
    }


def test_old_clients_send_only_the_first_loss_config():
    body = sdk.ForwardBackwardRequest(model_id="m", loss_fn_config={"beta": 0.1})
    assert training_protobuf.decode_forward_backward(body.SerializeToString()).loss_config == {"beta": 0.1}


def test_integers_become_int64_and_floats_float32():
    bfloat16 = (np.array([1.5, -2.0], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    datum = decode_datum(
        target_tokens=dense([1, 2], np.int32, sdk.DTYPE_INT32),
        advantages=sdk.Tensor(dense=bfloat16.tobytes(), dtype=sdk.DTYPE_BFLOAT16, shape=[2]),
    )
    np.testing.assert_array_equal(datum.loss_inputs["target_tokens"], np.array([1, 2]), strict=True)
    np.testing.assert_array_equal(
        datum.loss_inputs["advantages"], np.array([1.5, -2.0], np.float32), strict=True
    )


def test_cells_that_a_sparse_tensor_does_not_list_are_zero():
    datum = decode_datum(
        target_tokens=csr([5, 7], [0, 1, 1, 2], [0, 1], [3, 2]),
        weights=csr([1.0, 2.0, 3.0], [0, 1, 2, 3], [0, 1, 0], [3, 2], np.float32, sdk.DTYPE_FLOAT32),
    )
    assert datum.problem is None
    assert datum.loss_inputs["target_tokens"].tolist() == [[5, 0], [0, 0], [0, 7]]
    assert datum.loss_inputs["weights"].tolist() == [[1, 0], [0, 2], [3, 0]]


@pytest.mark.parametrize(
    "tensor, complaint",
    [
        (dense([1, 2, 3], np.int64, sdk.DTYPE_INT64, shape=[4]), "holds 3 values"),
        (sdk.Tensor(dense=b"1234567", dtype=sdk.DTYPE_INT64, shape=[1]), "7 bytes"),
        (sdk.Tensor(dense=b"1234", shape=[1]), "dtype number 0"),
        (dense([], np.int64, sdk.DTYPE_INT64, shape=[-1]), "shape"),
        (csr([1], [0, 1], [0], [1 << 40, 1 << 40]), "at most"),
        (csr([1], [0, 1], [0], [4]), "two dimensions"),
        (csr([1], [0, 1], [9], [1, 2]), "do not fit"),
        (csr([1], [0, 5], [0], [1, 2]), "do not fit"),
        (csr([1, 1], [0, 2, 1], [0, 0], [2, 2]), "do not fit"),
        (csr([], [], [], [0, 2]), "do not fit"),
        (dense([], np.int64, sdk.DTYPE_INT64, shape=[0, 2**63 - 1]), "claims the shape"),
        (dense([], np.int64, sdk.DTYPE_INT64, shape=[2**63 - 1, 0]), "claims the shape"),
        (csr([], [0], [], [0, 2**63 - 1]), "claims the shape"),
        (dense([1], np.int64, sdk.DTYPE_INT64, shape=[1] * 65), "claims 65 dimensions"),
        (dense([1], np.int64, sdk.DTYPE_INT64, shape=[2**62] * 1_000_000), "claims 1000000 dimensions"),
        (csr([1], [0, 1], [0], [2**62] * 1_000_000), "claims 1000000 dimensions"),
        (csr([1], [0, 2**63 - 1, -(2**63), -1, 1], [0], [4, 1]), "do not fit"),  # differences that wrap round
    ],
)
def test_a_broken_tensor_is_the_problem_of_its_datum(tensor, complaint):
    datum = decode_datum(weights=tensor)
    assert datum.problem is not None
    assert complaint in datum.problem
    assert datum.problem.startswith("weights")


def test_an_image_is_the_problem_of_its_datum():
    image = sdk.Chunk(image=sdk.ImageChunk(data=b"png", format="png"))
    datum = decode_datum(text([1]), image)
    assert datum.problem is not None
    assert "'image'" in datum.problem


@pytest.mark.parametrize("body", [b'{"model_id": "m"}', b"\xff\xff\xff", b"\x0a\xff"])
def test_bytes_that_are_no_protobuf_are_refused(body):
    with pytest.raises(InvalidRequest, match="protobuf"):
        training_protobuf.decode_forward_backward(body)
    with pytest.raises(InvalidRequest, match="protobuf"):
        training_protobuf.decode_address(body)


def test_the_sdk_reads_logprobs_of_any_length_and_width():
    logprobs = [
        np.array([-0.5, -1.5], np.float32),
        np.array([-2.5], np.float32),
        np.array([[-1.0, -2.0], [-3.0, -4.0]], np.float32),
    ]
    losses = [np.array([0.5, 1.5], np.float32), np.array([2.5], np.float32), np.array([3.0, 7.0], np.float32)]
    output = deserialize_forward_backward_output(
        training_protobuf.encode_forward_backward_output(logprobs, {"loss:sum": 4.5}, losses)
    )
    assert output.metrics == {"loss:sum": 4.5}
    read = [datum["logprobs"] for datum in output.loss_fn_outputs]
    assert [datum.shape for datum in read] == [[2], [1], [2, 2]]
    for ours, theirs in zip(logprobs, read, strict=True):
        np.testing.assert_array_equal(np.asarray(theirs.data).reshape(ours.shape), ours)
    read = [datum["elementwise_loss"].data for datum in output.loss_fn_outputs]
    assert [np.asarray(each).tolist() for each in read] == [each.tolist() for each in losses]


def span(sequence_id, length, offset=0, sampled=True):
    if sampled:
        run = sdk.SampledProvenanceSpan(sequence_id=sequence_id, offset=offset, length=length)
        return sdk.ProvenanceSpan(sampled_tokens=run)
    run = sdk.PromptProvenanceSpan(sequence_id=sequence_id, offset=offset, length=length)
    return sdk.ProvenanceSpan(prompt_tokens=run)


def spanned(of_tokens, of_targets=()):
    datum = sdk.Datum(
        model_input=[text([1, 2, 3])], model_input_spans=of_tokens, loss_fn_input_spans=of_targets
    )
    body = sdk.ForwardBackwardRequest(model_id="m", seq_id=1, data=[datum])
    return training_protobuf.decode_forward_backward(body.SerializeToString()).data[0]


def test_spans_say_where_runs_of_tokens_and_of_targets_come_from():
    datum = spanned([span("a:0", 1, offset=2, sampled=False), span("b:1", 2)], [span("c:0", 3)])
    assert datum.spans == (
        training_protobuf.TokenSpan("a:0", False, 2, 1),
        training_protobuf.TokenSpan("b:1", True, 0, 2),
    )
    assert datum.target_spans == (training_protobuf.TokenSpan("c:0", True, 0, 3),)
    assert datum.span_problem is None
    assert decode_datum().spans == decode_datum().target_spans == ()


@pytest.mark.parametrize("lengths, covered", [((1,), 1), ((2, 2), 4), ((4, -1), 3)])
@pytest.mark.parametrize("name", ["model_input_spans", "loss_fn_input_spans"])
def test_spans_that_do_not_tile_the_tokens_count_as_none(name, lengths, covered):
    tiling, wrong = [span("a:0", 3)], [span("a:0", length) for length in lengths]
    datum = spanned(wrong, tiling) if name == "model_input_spans" else spanned(tiling, wrong)
    assert datum.problem is None
    assert datum.spans == datum.target_spans == ()
    assert datum.span_problem == (
        f"its {name} cover {covered} tokens and model_input has 3; they must tile it, one after the other"
    )


def test_the_sparse_tensors_of_a_request_are_bounded_together():
    """A few bytes could stand for any number of zeros."""
    large = csr([], [0] * 4097, [], [4096, training_protobuf.MAX_ELEMENTS // 4096 // 2])
    datum = sdk.Datum(model_input=[text([1])], loss_fn_inputs={"weights": large})
    body = sdk.ForwardBackwardRequest(model_id="m", seq_id=1, data=[datum] * 3)
    first, second, third = training_protobuf.decode_forward_backward(body.SerializeToString()).data
    assert first.problem is second.problem is None
    assert third.problem is not None
    assert "send fewer datums at once" in third.problem
