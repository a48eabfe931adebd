"""Whatever JSON a config.json has at a key, it is followed or refused, never an error of Python."""

import math
from contextlib import suppress

import pytest

from spmd_tx.demo.tiny_families import FAMILIES
from spmd_tx.demo.tiny_model import Spec, model_config
from spmd_tx.models.families.keys import Refusal
from spmd_tx.models.families.registry import declare

ODD = ["x", [[]], {"a": 1}, -1, 0, True, 10**400, 2**31 - 2, 1e-30, math.nan]
LISTED = {
    "layer_types": ["full_attention"] * 2,
    "mlp_layer_types": ["dense", "sparse"],
    "no_rope_layers": [1, 0],
}
ROPES = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "yarn": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
        "attention_factor": 1.0,
        "truncate": False,
        "llama_4_scaling_beta": 0.1,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 512,
        "attention_factor": 1.1,
    },
}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "group_size": 32}
ENCODINGS = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": INT4}},
        "ignore": ["re:.*head"],
    },
}


def places(value, at=()):
    """Yield the keys and indices that lead to each value."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*at, key)
        yield from places(value[key], (*at, key))


def changed(raw, place, odd):
    """Return a copy in which one place has another value."""
    key, *rest = place
    copied = raw.copy()
    copied[key] = changed(raw[key], rest, odd) if rest else odd
    return copied


def try_all(raw, places):
    declare(raw)  # which is not refused
    for place in places:
        for odd in ODD:
            with suppress(Refusal):
                model = declare(changed(raw, place, odd))
                for layer in model.layers[:2]:
                    if rope := getattr(layer.mixer, "rope", None):
                        angles = rope.frequencies(getattr(layer.mixer, "rope_width", layer.mixer.width))
                        assert all(map(math.isfinite, (*angles, rope.amplitude, rope.score_factor)))


def test_a_value_that_all_families_have_is_followed_or_refused():
    raw = model_config(Spec(), {})
    try_all(raw, [*places(raw), ("text_config",), ("quantization_config",), ("rope_parameters",)])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_that_a_family_adds_is_followed_or_refused(family):
    raw = model_config(Spec(family=family), {})
    added = places(FAMILIES[family] | {"num_hidden_layers": 2})
    try_all(raw, [*added, ("quantization_config",), *((key,) for key in LISTED)])


@pytest.mark.parametrize(
    "key, value",
    [
        *(("rope_parameters", rope) for rope in ROPES.values()),
        *(("quantization_config", encoding) for encoding in ENCODINGS.values()),
    ],
    ids=[*ROPES, *ENCODINGS],
)
def test_a_value_within_an_object_is_followed_or_refused(key, value):
    raw = model_config(Spec(family="qwen3"), {}) | {key: value}
    try_all(raw, [place for place in places(raw) if place[0] == key])


@pytest.mark.parametrize(
    "family, key", [("qwen3", "layer_types"), ("glm4_moe", "mlp_layer_types"), ("smollm3", "no_rope_layers")]
)
def test_lists_of_layers_have_one_known_entry_for_each(family, key):
    raw = model_config(Spec(family=family), {}) | {key: LISTED[key]}
    try_all(raw, [(key, 0), (key, 1)])
    for count in (0, 1, 3):
        with pytest.raises(Refusal, match=f"sets {key} to .*, which are {count} for 2 layers"):
            declare(raw | {key: (2 * LISTED[key])[:count]})


def test_a_long_value_is_cut_in_messages():
    raw = model_config(Spec(family="qwen3"), {}) | {"rms_norm_eps": ["small"] * 1000}
    with pytest.raises(Refusal) as refused:
        declare(raw)
    assert len(str(refused.value)) < 300
