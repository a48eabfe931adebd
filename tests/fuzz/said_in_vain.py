"""Requests in order but for one thing that nobody reads, or that contradicts another: none may be taken.

Unknown parameters of addresses, unknown fields of JSON and of protobuf at any depth, a sample whose model is
not that of its sampling session, and a chunk of a prompt with two contents.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.fuzz import odd_questions, odd_sampling, odd_training, odd_trajectories
from tests.fuzz.calls import API, BASE_MODEL, JSON, PROTOBUF, Call, Names
from tests.fuzz.oddities import Oddities, Plain, as_json

# Objects of requests whose fields have names; the fields of others may have any.
NAMED = (
    *("adam_params", "sampling_params", "lora_config", "optimizer_config", "prompt", "cursor", "target"),
    *("settings", "forward_backward_input", "forward_input", "model_input", "data", "chunks", "reason"),
)
PNG = "iVBORw0KGgo="


def said_in_vain(odd: Oddities, names: Names) -> Call:
    attack = odd.random.choice([_field, _field, _parameter, _protobuf_field, _other_model, _two_contents])
    return replace(attack(odd, names), is_refused=True)


def _field(odd: Oddities, names: Names) -> Call:
    """Of JSON, in one of the objects that the body consists of."""
    plain = Plain(odd.random)
    kinds = (
        *(odd_training.optim_step, odd_training.create_model, odd_training.save, odd_sampling.sample),
        *(odd_training.batch_in_json, odd_sampling.create_sampler, odd_questions.search),
        *(odd_trajectories.create, odd_trajectories.train_on, odd_questions.create_session),
    )
    call = odd.random.choice(kinds)(plain, names)
    body = json.loads(call.body or b"{}")
    tree = body
    while (inner := [tree[key] for key in NAMED if tree.get(key)]) and odd.chance(0.6):
        tree = odd.random.choice(inner)
        if isinstance(tree, list):
            tree = odd.random.choice(tree)
    name = odd.random.choice(["learning_rat", "Seed", "temprature", "zz_new", " ", "model-id"])
    tree[name] = odd.random.choice([1, "a", True, [0], {"a": None}, 0.5, odd.text() or "b"])
    return replace(call, body=as_json(body, odd.random))


def _parameter(odd: Oddities, names: Names) -> Call:
    """Of an address."""
    ask: Callable[[Oddities, Names], Call] = odd.random.choice(
        [odd_questions.query, odd_questions.search, odd_trajectories.look, odd_training.create_model]
    )
    call = ask(Plain(odd.random), names)
    name = odd.random.choice(["limitt", "Limit", "offset%00", "zz", "tokens[]", "%F0%9F%98%80", "page"])
    return replace(
        call, path=f"{call.path}{'&' if '?' in call.path else '?'}{name}={odd.random.randrange(9)}"
    )


def _protobuf_field(odd: Oddities, names: Names) -> Call:
    """Of a newer SDK, in the request or in what it consists of."""
    request = odd_training.batch_in_protobuf(Plain(odd.random), names)
    datum = request.data[0]
    chunk = datum.model_input[0]
    places = [request, datum, chunk, chunk.encoded_text, *datum.loss_fn_inputs.values()]
    odd.random.choice(places).MergeFromString(_unknown(odd))
    return Call("POST", API + "forward_backward", request.SerializeToString(deterministic=True), PROTOBUF)


def _unknown(odd: Oddities) -> bytes:
    """A field of number 100 to 2,000, of each kind that protobuf has but groups."""
    kind, content = odd.random.choice([(0, b"\x01"), (1, b"\x01" * 8), (2, b"\x02ab"), (5, b"\x01" * 4)])
    tag = odd.random.choice([100, 200, 2000]) << 3 | kind
    return bytes([tag & 0x7F | 0x80, tag >> 7]) + content


def _other_model(odd: Oddities, names: Names) -> Call:
    call = odd_sampling.sample(Plain(odd.random), names)
    others = [
        {"base_model": f"{BASE_MODEL}-2"},
        {"base_model": names.model},
        {"model_path": names.checkpoint("sampler_weights")},
        {"model_path": "tinker://a/weights/b", "base_model": BASE_MODEL},
    ]
    body = json.loads(call.body or b"{}") | odd.random.choice(others)
    return replace(call, body=as_json(body, odd.random))


def _two_contents(odd: Oddities, names: Names) -> Call:
    other = odd.random.choice(
        [{"data": PNG, "format": "png"}, {"location": "http://127.0.0.1:1/"}, {"dmel": PNG}, {"data": ""}]
    )
    make = odd.random.choice([odd_sampling.sample, odd_training.batch_in_json])
    call = make(Plain(odd.random), names)
    body = json.loads(call.body or b"{}")
    chunk: dict[str, Any] = _prompt(body)["chunks"][0]
    chunk |= other
    if odd.chance(0.5):
        del chunk["type"]
    return replace(call, body=as_json(body, odd.random), content_type=JSON)


def _prompt(body: dict[str, Any]) -> dict[str, Any]:
    """Of a sample, or of the first datum of a batch."""
    if "prompt" in body:
        return body["prompt"]
    batch = body.get("forward_backward_input") or body["forward_input"]
    return batch["data"][0]["model_input"]
