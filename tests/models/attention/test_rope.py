"""Rotary embeddings and growth of queries equal those of transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.models import layers
from spmd_tx.models.attention.rope import angles, grow_queries, rotate
from spmd_tx.models.declared.rope import Llama3, Rope, Yarn
from spmd_tx.models.families.keys import ConfigKeys, Refusal
from spmd_tx.models.families.rope import read_rope
from tests.golden.parts import GROWING, PARTS, POSITIONS, ROPES, random

GOLDEN = np.load(PARTS)
POSITIONS_BT = jnp.asarray(POSITIONS[None])
turned = jax.jit(rotate, static_argnums=2)


def declared(name: str) -> Rope:
    case = ROPES[name]
    return read_rope(ConfigKeys(case.config), case.head_width)


@pytest.mark.parametrize("name", ROPES)
def test_angles_are_those_of_transformers(name):
    rope = declared(name)
    found = np.stack(jax.jit(angles, static_argnums=(1, 2))(POSITIONS_BT, rope, ROPES[name].head_width))[:, 0]
    np.testing.assert_allclose(found, GOLDEN[f"rope/{name}"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", GROWING)
def test_queries_grow_as_in_transformers(name):
    q = random(0, 1, len(POSITIONS), 2, 4)
    found = jax.jit(grow_queries, static_argnums=2)(q, POSITIONS_BT, declared(name))
    expected = GOLDEN[f"growth/{name}"]
    assert expected.max() > 1.1
    np.testing.assert_allclose(found, q * expected[None, :, None, None], rtol=1e-6)


def test_a_plain_rope_has_the_bits_that_it_always_had():
    x = random(1, 1, len(POSITIONS), 3, 16)
    always = jax.jit(layers.rotate, static_argnums=2)(x, POSITIONS_BT, 1e6)
    assert np.array_equal(turned(x, POSITIONS_BT, Rope(1e6)), always)


@pytest.mark.parametrize("width", [0, 8])
def test_interleaved_pairs_are_rotated_as_halves_are_and_the_rest_of_a_head_stays(width):
    x = random(2, 1, len(POSITIONS), 3, 16)
    rotated = width or 16
    halves = np.concatenate([x[..., 0:rotated:2], x[..., 1:rotated:2], x[..., rotated:]], axis=-1)
    scaling = Llama3(8.0, 1.0, 4.0, 64)
    interleaved = np.asarray(turned(x, POSITIONS_BT, Rope(1e4, width, scaling, is_interleaved=True)))
    assert np.array_equal(interleaved, turned(halves, POSITIONS_BT, Rope(1e4, width, scaling)))
    assert np.array_equal(interleaved[..., rotated:], x[..., rotated:])
    assert not np.allclose(interleaved[0, -1, :, :rotated], halves[0, -1, :, :rotated])


def test_lengths_of_yarn_add_to_the_table_of_positions():
    assert declared("yarn").most_positions(200) == 256
    assert declared("yarn").most_positions(300) == 300
    assert declared("llama3").most_positions(256) == 256


def test_yarn_without_a_factor_takes_the_growth_of_the_context():
    scaling = {"type": "yarn", "original_max_position_embeddings": 64}
    rope = read_rope(ConfigKeys(ROPES["plain"].config | {"rope_scaling": scaling}), 16)
    assert isinstance(rope.scaling, Yarn)
    assert rope.scaling.factor == 4.0


def test_only_latent_attention_with_its_own_mscale_changes_scores():
    assert declared("yarn").score_factor == 1.0
    grown = 0.1 * 0.7 * np.log(40) + 1
    assert declared("deepseek").score_factor == pytest.approx(grown**2)


@pytest.mark.parametrize(
    "scaling, reason",
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic', which is not supported"),
        ({"rope_type": "linear"}, "lacks the key 'factor' of its rotary embedding"),
        ({"rope_type": "yarn", "factor": -4.0}, "must be a number from 1e-30"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}, "above"),
        ({"full_attention": {"rope_type": "default"}}, "differ between layers"),
        ({"partial_rotary_factor": 0.35}, "rotates 5 of 16 numbers"),
    ],
)
def test_what_is_not_served_is_refused_with_its_reason(scaling, reason):
    config = ROPES["plain"].config | {"rope_parameters": scaling | {"rope_theta": 1e4}}
    with pytest.raises(Refusal, match=reason):
        read_rope(ConfigKeys(config), 16)
