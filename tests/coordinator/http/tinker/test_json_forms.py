import json
import re

import msgspec
import numpy as np
import pytest

from spmd_tx.coordinator.http.tinker import json_forms
from spmd_tx.coordinator.http.tinker.json_forms import LossRequest, from_protobuf, to_protobuf
from spmd_tx.coordinator.wire import tinker_pb2 as pb
from spmd_tx.coordinator.wire.sampling_protobuf import PromptScores, SampledSequence, encode_sample_response
from spmd_tx.coordinator.wire.training_protobuf import decode_forward_backward, encode_forward_backward_output
from spmd_tx.errors import InvalidRequest


def rewritten(data, forward_only=False, **more):
    loss = {"data": data, "loss_fn": "cross_entropy", **more}
    name = "forward_input" if forward_only else "forward_backward_input"
    body = json.dumps({"model_id": "m", "seq_id": 3, name: loss}).encode()
    address, packed = to_protobuf(msgspec.json.decode(body, type=LossRequest), forward_only)
    request = decode_forward_backward(packed)
    assert (address.model_id, address.seq_id, address.forward_only) == ("m", 3, forward_only)
    assert (request.model_id, request.seq_id, request.forward_only) == ("m", 3, forward_only)
    return request


def one_datum(chunk=None, **tensor):
    chunk = chunk or {"tokens": [1, 2, 3]}
    inputs = {"x": {"data": [1, 0, 2], "dtype": "int64", **tensor}}
    return rewritten([{"model_input": {"chunks": [chunk]}, "loss_fn_inputs": inputs}]).data[0]


def test_a_request_means_the_same_in_both_forms():
    request = rewritten(
        [
            {
                "model_input": {"chunks": [{"tokens": [5, 6]}, {"type": "encoded_text", "tokens": [7]}]},
                "loss_fn_inputs": {
                    "target_tokens": {"data": [6, 7, 8], "dtype": "int64", "shape": [3]},
                    "weights": {"data": [1, 0.5, -2], "dtype": "float32", "shape": [3]},
                },
            }
        ],
        loss_fn_config={"beta": 0.1, "mode": "text"},
        forward_only=True,
    )
    assert (request.loss_fn, request.loss_config) == ("cross_entropy", {"beta": 0.1, "mode": "text"})
    (datum,) = request.data
    assert datum.tokens.tolist() == [5, 6, 7]
    assert datum.loss_inputs["target_tokens"].tolist() == [6, 7, 8]
    assert datum.loss_inputs["weights"].tolist() == [1.0, 0.5, -2.0]
    assert {name: array.dtype.str for name, array in datum.loss_inputs.items()} == {
        "target_tokens": "<i8",
        "weights": "<f4",
    }


def test_nulls_and_missing_fields_are_defaults():
    assert rewritten([], loss_fn_config=None).loss_config == {}
    assert rewritten([{"model_input": {"chunks": []}}]).data[0].tokens.size == 0


def test_a_sparse_tensor_stays_one():
    datum = one_datum(data=[4, 5], shape=[3, 2], sparse_crow_indices=[0, 1, 1, 2], sparse_col_indices=[1, 0])
    assert datum.loss_inputs["x"].tolist() == [[0, 4], [0, 0], [5, 0]]


@pytest.mark.parametrize(
    "more, complaint",
    [
        ({"dtype": "float16"}, "dtype"),
        ({"shape": [4]}, "shape"),
        ({"shape": [10**30]}, "shape"),
        ({"shape": [2**63]}, "shape"),
        ({"shape": [-(2**63) - 1]}, "shape"),
        ({"shape": [1] * 65}, "dimensions"),
        (
            {"shape": [1, 3], "sparse_crow_indices": [0, 10**400], "sparse_col_indices": [0, 1, 2]},
            "do not fit",
        ),
        (
            {"shape": [1, 3], "sparse_crow_indices": [0, 3], "sparse_col_indices": [0, 1, 10**400]},
            "do not fit",
        ),
        ({"chunk": {"type": "image", "data": "\xf6", "format": "png"}}, "'image'"),
        ({"sparse_crow_indices": [0, 3]}, "sparse"),
        ({"sparse_crow_indices": [0, 3], "sparse_col_indices": [0, 1, 2]}, "two dimensions"),
        ({"chunk": {"type": "image", "data": "aGk=", "format": "png"}}, "'image'"),
        ({"chunk": {"type": "dmel", "dmel": "not base64!"}}, "'dmel'"),
        ({"chunk": {"type": "image_asset_pointer", "location": "s3://x"}}, "encoded_text"),
    ],
)
def test_what_cannot_be_used_is_said_of_its_datum(more, complaint):
    assert complaint in (one_datum(**more).problem or "")


def test_numbers_that_do_not_fit_stay_wrong():
    assert one_datum(data=[2**80, 1.0, 2.0]).loss_inputs["x"][0] == 2**53
    assert one_datum(data=[0.5, 1.0, 2.0]).loss_inputs["x"].dtype.kind == "f"
    assert one_datum({"tokens": [-(2**40)]}).tokens.tolist() == [-(2**31) + 1]
    assert one_datum({"tokens": [10**400, 5]}).tokens.tolist() == [2**31 - 1, 5]
    assert np.isinf(one_datum(data=[1e300, 1.0, 2.0], dtype="float32").loss_inputs["x"][0])


@pytest.mark.parametrize(
    "body, complaint",
    [
        ({"seq_id": 1}, "forward_backward_input"),
        ({"seq_id": 2**31, "forward_backward_input": {"data": [], "loss_fn": "x"}}, "seq_id is 2147483648"),
    ],
)
def test_a_request_without_its_parts_is_refused(body, complaint):
    request = msgspec.convert({"model_id": "m", **body}, LossRequest)
    with pytest.raises(InvalidRequest, match=complaint):
        to_protobuf(request, forward_only=False)


@pytest.mark.parametrize(
    "wrong, place",
    [
        (5, "`$.forward_backward_input.data[1]`"),
        (
            {"model_input": {"chunks": [{"tokens": "x"}]}},
            "`$.forward_backward_input.data[1].model_input.chunks[0]",
        ),
    ],
)
def test_datums_are_decoded_one_by_one_and_the_message_names_the_wrong_one(wrong, place):
    loss = {"data": [{"model_input": {"chunks": []}}, wrong], "loss_fn": "cross_entropy"}
    body = json.dumps({"model_id": "m", "seq_id": 3, "forward_backward_input": loss}).encode()
    request = msgspec.json.decode(body, type=LossRequest)
    with pytest.raises(msgspec.ValidationError, match=re.escape(place)):
        to_protobuf(request, forward_only=False)


def test_a_loss_result_says_the_same_in_json():
    arrays = [np.array([-1.5, -2.0], np.float32), np.array([[-1.0, -3.0]], np.float32)]
    arrays.append(np.array([np.nan, -np.inf], np.float32))
    packed = encode_forward_backward_output(arrays, {"loss:sum": float("nan"), "num_tokens:sum": 5.0})
    assert json.loads(from_protobuf("forward", packed)) == {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [
            {"logprobs": {"data": [-1.5, -2.0], "dtype": "float32", "shape": [2]}},
            {"logprobs": {"data": [-1.0, -3.0], "dtype": "float32", "shape": [1, 2]}},
            {"logprobs": {"data": ["NaN", "-Infinity"], "dtype": "float32", "shape": [2]}},
        ],
        "metrics": {"loss:sum": "NaN", "num_tokens:sum": 5.0},
    }


def test_a_sample_says_the_same_in_json():
    sequences = [SampledSequence([1, 2], [-0.5, -1.0], "stop"), SampledSequence([3], [-2.0], "length")]
    prompt = np.array([np.nan, -4.0], np.float32)
    response = pb.SampleResponse.FromString(encode_sample_response(sequences, PromptScores(prompt)))
    topk = response.topk_prompt_logprobs
    topk.k, topk.length = 2, 2
    topk.token_ids = np.array([0, 0, 7, 0], "<i4").tobytes()
    topk.logprobs = np.array([-99999.0, -99999.0, -0.25, -99999.0], "<f4").tobytes()
    assert json.loads(from_protobuf("sample", response.SerializeToString())) == {
        "type": "sample",
        "sequences": [
            {"stop_reason": "stop", "tokens": [1, 2], "logprobs": [-0.5, -1.0]},
            {"stop_reason": "length", "tokens": [3], "logprobs": [-2.0]},
        ],
        "prompt_logprobs": [None, -4.0],
        "topk_prompt_logprobs": [None, [[7, -0.25]]],
    }
    plain = json.loads(from_protobuf("sample", encode_sample_response(sequences)))
    assert plain.keys() == {"type", "sequences"}


@pytest.mark.parametrize(
    "accept, wanted",
    [
        ("application/json", True),
        ("application/x-protobuf, application/json", False),
        ("application/x-protobuf", False),
        ("*/*", False),
        ("", False),
    ],
)
def test_json_is_for_those_who_cannot_read_protobuf(accept, wanted):
    assert json_forms.is_wanted(accept) is wanted
