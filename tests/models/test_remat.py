"""What the backward pass computes once more, beside what XLA counts of the compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.models.families.registry import declare
from spmd_tx.models.layers import rms_norm
from spmd_tx.models.remat import REMAT_LEVELS, computed_twice
from tests.golden import families
from tests.support.flops import flops
from tests.support.known_models import CONFIGS

pytestmark = pytest.mark.usefixtures("quickly_compiled")


def twice(name: str) -> list[float]:
    """Billions of numbers that each level, the least first, multiplies once more."""
    model = declare(CONFIGS[name])
    return [computed_twice(model, level) / 1e9 for level in REMAT_LEVELS]


def test_a_dense_model_computes_all_but_the_last_maps_again():
    attention, inner = 36 * 4096 * 2 * (4096 + 1024) / 1e9, 36 * 2 * 4096 * 12288 / 1e9
    assert tuple(REMAT_LEVELS) == ("none", "light", "mlp", "full")
    assert twice("Qwen/Qwen3-8B") == pytest.approx([0, 0, inner, attention + inner])


def test_experts_are_computed_again_whatever_is_kept():
    none, light, mlp, full = twice("Qwen/Qwen3-30B-A3B")
    assert none == light == pytest.approx(48 * 8 * 2 * 2048 * 768 / 1e9)
    assert mlp == pytest.approx(light, rel=0.02), "the router's scores"
    assert full - mlp == pytest.approx(48 * 2048 * 2 * (4096 + 512) / 1e9)


def test_of_several_layers_that_are_kept_together_all_but_the_last_are_computed_to_their_ends():
    none, light, *_ = twice("openai/gpt-oss-120b")
    assert none == pytest.approx(36 * 4 * 2 * 2880 * 2880 / 1e9)
    assert light - none == pytest.approx(18 * 4 * 3 * 2880 * 2880 / 1e9)


def test_of_layers_with_a_state_nothing_is_kept():
    """Of four layers three have linear attention, and their shared experts end once more."""
    none, light, *_ = twice("Qwen/Qwen3.5-35B-A3B")
    mixer = 2048 * (2 * 2048 + 3 * 4096 + 2 * 32)
    assert light - none == pytest.approx(30 * (mixer + 8 * 3 * 2048 * 512 + 2048 * 512) / 1e9)


def test_devices_that_share_a_model_each_compute_their_part():
    model = declare(CONFIGS["Qwen/Qwen3-8B"])
    assert computed_twice(model, "full", 8) == pytest.approx(computed_twice(model, "full") / 8)


WIDER = {"hidden_size": 1024, "vocab_size": 2048, "moe_intermediate_size": 512}
SIZES = {
    "llama": WIDER | {"intermediate_size": 2048},
    "qwen3_moe": WIDER,
    "gpt_oss": WIDER | {"intermediate_size": 512},
    "qwen3_5_moe": WIDER | {"shared_expert_intermediate_size": 512},
}
ROWS = 4, 1024
MORE = 1.15  # attention, its recurrence, and free places among pairs of a token and an expert


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, level",
    [
        ("llama", "mlp"),
        ("llama", "full"),
        ("qwen3_moe", "none"),
        ("qwen3_moe", "full"),
        ("gpt_oss", "light"),
        ("qwen3_5_moe", "mlp"),
    ],
)
def test_a_training_step_computes_what_is_predicted(family, level):
    raw = families.CONFIGS[family]
    model = declare(raw | {key: size for key, size in SIZES[family].items() if key in raw})
    numbers = 2 * model.numbers_met() + computed_twice(model, level)
    expected = 2 * ROWS[0] * ROWS[1] * numbers
    assert expected < flops(model, ROWS, level=level) < MORE * expected


def test_a_norms_backward_pass_keeps_its_numbers_once():
    x = np.linspace(-1, 2, 4 * 64, dtype=np.float32).reshape(4, 64)

    @jax.jit
    def gradient(x):
        y, pull_back = jax.vjp(lambda x: rms_norm(x, jnp.ones(64), 1e-6), x)
        assert [leaf.size for leaf in jax.tree.leaves(pull_back)].count(x.size) == 1
        return pull_back(jnp.cos(y))[0]

    @jax.jit
    @jax.grad
    def plain(x):
        return jnp.sum(jnp.sin(x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)))

    np.testing.assert_allclose(gradient(x), plain(x), atol=1e-6)
