"""Odd requests that train: batches in JSON and protobuf, steps, saves, loads, models and custom losses."""

import copy
from typing import Any

import numpy as np

from spmd_tx.coordinator.training.losses import LOSSES
from spmd_tx.coordinator.wire import tinker_pb2 as pb
from tests.custom_loss.recorded import recorded
from tests.fuzz.calls import API, BASE_MODEL, PROTOBUF, Call, Names, pick
from tests.fuzz.oddities import Oddities, as_json

INPUTS = {
    name: [key for key in (*entry.needed, *entry.else_ones) if key != "target_tokens"]
    for name, entry in LOSSES.items()
}
NUMBERS = {
    "float32": (pb.DTYPE_FLOAT32, "<f4"),
    "int64": (pb.DTYPE_INT64, "<i8"),
    "int32": (pb.DTYPE_INT32, "<i4"),
}
SSH = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHsKLqeplhpW+uObz5dvMgjz1OxfM/XXUB+VHtZ6isGN"
Body = dict[str, Any]


def posted(odd: Oddities, path: str, body: Body, spoil: float = 0.7) -> Call:
    """In order, or with something odd in it."""
    return Call("POST", API + path, as_json(odd.spoilt(body) if odd.chance(spoil) else body, odd.random))


def create_model(odd: Oddities, names: Names) -> Call:
    lora = {
        "rank": odd.random.choice([1, 4, 8]) if names.rank else 0,
        "seed": 9,
        "train_unembed": True,
        "train_mlp": True,
        "train_attn": True,
    }
    body = {"session_id": names.session, "model_seq_id": names.next_other(), "base_model": BASE_MODEL}
    return posted(odd, "create_model", {**body, "lora_config": lora, "user_metadata": {"a": "b"}})


def forward_backward(odd: Oddities, names: Names) -> Call:
    loss = odd.random.choice(list(INPUTS))
    inputs = [{"name": name, "rank": 1} for name in INPUTS[loss]]
    body = _batch(odd, names, loss, inputs)
    return _sent(odd, body)


def batch_in_json(odd: Oddities, names: Names) -> Call:
    return _as_json(odd, _batch(odd, names, "cross_entropy", [{"name": "weights", "rank": 1}]))


def batch_in_protobuf(odd: Oddities, names: Names) -> pb.ForwardBackwardRequest:
    return _message(_batch(odd, names, "cross_entropy", [{"name": "weights", "rank": 1}]))


def custom_batch(odd: Oddities, names: Names) -> Call:
    loss_id, inputs = pick(odd.random, names.losses, ("loss-none", [{"name": "logprobs", "rank": 1}]))
    body = _batch(odd, names, "custom", [each for each in inputs if each["name"] != "logprobs"])
    return _sent(odd, {**body, "loss_fn_config": {"loss_id": loss_id}})


def create_custom_loss(odd: Oddities, names: Names) -> Call:
    definitions = [each.definition for each in recorded().values()]
    definition = copy.deepcopy(odd.random.choice(definitions))
    if odd.chance(0.3):
        node = odd.random.randrange(len(definition["graph"]["nodes"]))
        definition["graph"]["nodes"][node] = odd.spoilt(definition["graph"]["nodes"][node])
    body = {"session_id": names.session, "custom_loss_seq_id": names.next_other(), **definition}
    return posted(odd, "create_custom_loss", body, 0.3)


def optim_step(odd: Oddities, names: Names) -> Call:
    adam = {
        "learning_rate": 0.01,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "grad_clip_norm": 1.0,
    }
    return posted(odd, "optim_step", {**_numbered(names), "adam_params": adam})


def save(odd: Oddities, names: Names) -> Call:
    kept = {"path": odd.random.choice(["ck", "other"]), "ttl_seconds": 3600}
    overwriting = {**kept, "overwrite": True, "user_metadata": {"a": "b"}}
    numbered = _numbered(names)
    match odd.random.randrange(4):
        case 0:
            return posted(odd, "save_weights", {**numbered, **overwriting})
        case 1:
            return posted(odd, "save_weights_for_sampler", {**numbered, **overwriting})
        case 2:
            own = {
                "sampling_session_seq_id": names.next_other(),
                "kind": odd.random.choice(["snapshot", "inflight"]),
            }
            return posted(odd, "save_weights_for_sampler", {**numbered, **own})
    return posted(odd, "save_weights_external", {**numbered, **kept, "age_encryption_recipients": [SSH]})


def load(odd: Oddities, names: Names) -> Call:
    body = {
        "path": names.checkpoint(odd.random.choice(["weights", "weights", "sampler_weights"])),
        "optimizer": True,
    }
    if odd.chance(0.5):
        return posted(odd, "load_weights", {**_numbered(names), **body})
    new = {"session_id": names.session, "model_seq_id": names.next_other(), "user_metadata": {"z": "1"}}
    return posted(
        odd, "load_weights", {**new, **body, "optimizer_config": {"type": "adamw"}, "base_model": BASE_MODEL}
    )


def _numbered(names: Names) -> Body:
    return {"model_id": names.model, "seq_id": names.next_training()}


def _batch(odd: Oddities, names: Names, loss: str, inputs: list[Body]) -> Body:
    data = [_datum(odd, names, inputs) for _ in range(odd.random.randint(1, 3))]
    return {
        **_numbered(names),
        "data": data,
        "loss_fn": loss,
        "loss_fn_config": {},
        "forward_only": odd.chance(0.2),
    }


def _datum(odd: Oddities, names: Names, inputs: list[Body]) -> Body:
    tokens = odd.tokens()
    length = len(tokens)
    tensors = {"target_tokens": {"data": tokens, "dtype": "int64", "shape": [length]}}
    for each in inputs:
        shape = [[1], [length], [length, 2]][each["rank"]]
        values = [float(odd.random.randint(-2, 2)) for _ in range(int(np.prod(shape)))]
        tensors[each["name"]] = {"data": values, "dtype": "float32", "shape": shape}
    is_of_one_target = [each["name"] for each in inputs] != ["weights"]
    for tensor in tensors.values() if odd.chance(0.02 if is_of_one_target else 0.4) else ():
        rows = {"shape": [length, 3], "sparse_crow_indices": list(range(length + 1))}
        tensor.update(rows, data=tensor["data"][:length], sparse_col_indices=[0] * length)
    sequence = f"{pick(odd.random, names.requests, 'none')}:0"
    spans = [{"sampled": True, "sequence_id": sequence, "offset": 0, "length": length}]
    return {
        "model_input": {"chunks": [{"tokens": tokens, "type": "encoded_text"}]},
        "loss_fn_inputs": tensors,
        "spans": spans if odd.chance(0.4) else [],
    }


def _sent(odd: Oddities, body: Body) -> Call:
    if odd.chance(0.25):
        body = odd.spoilt(body)
    elif odd.chance(0.5):
        datum = odd.random.choice(body["data"])
        place = odd.random.choice([datum, datum["loss_fn_inputs"], datum["loss_fn_inputs"]])
        name = odd.random.choice(list(place))
        place[name] = odd.spoilt({"one": place[name]})["one"]
    if odd.chance(0.35):
        return _as_json(odd, body)
    try:
        content = bytearray(_message(body).SerializeToString(deterministic=True))
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError):
        return _as_json(odd, body)  # protobuf has no such value
    if odd.chance(0.03) and content:
        content[odd.random.randrange(len(content))] ^= 1 << odd.random.randrange(8)
    return Call("POST", API + "forward_backward", bytes(content), PROTOBUF)


def _as_json(odd: Oddities, body: Body) -> Call:
    numbered = {key: body.get(key) for key in ("model_id", "seq_id")}
    loss = {key: body.get(key) for key in ("data", "loss_fn", "loss_fn_config")}
    for datum in loss["data"] if isinstance(loss["data"], list) else ():
        if isinstance(datum, dict):
            datum.pop("spans", None)  # protobuf alone has them
    name = "forward" if body.get("forward_only") is True else "forward_backward"
    return Call("POST", API + name, as_json({**numbered, f"{name}_input": loss}, odd.random))


def _message(body: Body) -> pb.ForwardBackwardRequest:
    message = pb.ForwardBackwardRequest(
        model_id=body["model_id"],
        seq_id=body["seq_id"],
        loss_fn=body["loss_fn"],
        forward_only=body["forward_only"],
    )
    for key, value in body["loss_fn_config"].items():
        setattr(message.loss_fn_config_v2[key], "text" if isinstance(value, str) else "number", value)
    for each in body["data"]:
        datum = message.data.add()
        for chunk in each["model_input"]["chunks"]:
            datum.model_input.add().encoded_text.tokens = _packed(chunk["tokens"], "<i4")
        for name, tensor in each["loss_fn_inputs"].items():
            _fill(datum.loss_fn_inputs[name], tensor)
        for span in each["spans"]:
            for spans in (datum.model_input_spans, datum.loss_fn_input_spans):
                sequence = spans.add().sampled_tokens if span["sampled"] else spans.add().prompt_tokens
                sequence.sequence_id = span["sequence_id"]
                sequence.offset, sequence.length = span["offset"], span["length"]
    return message


def _fill(message: pb.Tensor, tensor: Body) -> None:
    number, dtype = NUMBERS.get(tensor["dtype"], (77, "<f4"))
    message.dtype = number  # pyright: ignore[reportAttributeAccessIssue]
    message.shape.extend(tensor["shape"])
    if "sparse_crow_indices" not in tensor:
        message.dense = _packed(tensor["data"], dtype)
        return
    message.sparse_csr.values = _packed(tensor["data"], dtype)
    message.sparse_csr.crow_indices = _packed(tensor["sparse_crow_indices"], "<i8")
    message.sparse_csr.col_indices = _packed(tensor["sparse_col_indices"], "<i8")


def _packed(values: list[Any], dtype: str) -> bytes:
    """As C would have it: what is beyond the type wraps around."""
    if dtype == "<f4":
        with np.errstate(over="ignore"):
            return np.array(values, np.float64).astype(dtype).tobytes()
    bits = 8 * np.dtype(dtype).itemsize
    wrapped = [(int(value) + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1) for value in values]
    return np.array(wrapped, dtype).tobytes()
