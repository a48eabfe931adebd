"""Qwen3.5 equals transformers with an adapter: packed rows on a mesh, and prefill and decode from slots."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.models import head
from spmd_tx.models.adapters.lora import Adapters, Lora, adapter_weights
from spmd_tx.models.adapters.row_lora import row_lora
from spmd_tx.models.attention.kv_cache import cache_weights, decode_attend, prefill_attend
from spmd_tx.models.backbone import backbone
from spmd_tx.models.base_weights import weights
from spmd_tx.models.checkpoint import huggingface
from spmd_tx.models.declared.delta_rule import DeltaRule
from spmd_tx.models.families import qwen3_5
from spmd_tx.models.families.keys import ConfigKeys, Refusal
from spmd_tx.models.forward_pass import Pass, StateSlots
from spmd_tx.models.linear_attention import state_pool
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.mesh import DATA, TP, make_mesh
from spmd_tx.sharding.transfer import to_devices
from spmd_tx.sharding.weight import shardings, specs
from spmd_tx.worker.state import zeros
from spmd_tx.worker.steps.train import both_loras, own_adapters, segment_attend
from tests.golden import delta_model
from tests.golden.delta_cases import NUMBERS
from tests.golden.delta_model import CONFIG, LENGTHS, RANK, SCALE, TEXT, rows_of

pytestmark = pytest.mark.usefixtures("quickly_compiled")

MODEL = qwen3_5.dense(ConfigKeys(CONFIG))
TOLERANCE = 1e-5  # relative to the largest logit
PAGE_SIZE, SLOT = 16, 2
CUT = LENGTHS[1] - 6  # tokens that are read at once; the others are decoded


def loaded(directory, mesh):
    """Return the declarations and arrays of the weights, and of one slot with the adapter."""
    base = weights(MODEL, mesh, jnp.float32)
    path = delta_model.write(directory / "model")
    arrays = huggingface.load(path, base, mesh, lambda _: None, MODEL.unread)
    slots = adapter_weights(MODEL, mesh, 1, RANK, jnp.float32, zero=True)
    pairs = {}
    for name, adapted in MODEL.adapted.items():
        lead = len(adapted.numbers or range(1))
        a, b = delta_model.factors(name, lead, adapted.map.width_in, adapted.map.width_out)
        is_head = adapted.numbers is None
        pairs[name] = Lora(a, b) if is_head else Lora(a[:, None], b[:, None])
    adapter = Adapters({name: pairs[name] for name in slots.layers}, pairs["head"])
    return base, arrays, slots, jax.tree.map(to_devices, adapter, shardings(mesh, slots))


def logits_of(base, adapters, how, tokens, positions, cache=None):
    whole = own_adapters(MODEL, adapters)
    h, cache, _ = backbone(MODEL, base, whole, tokens, positions, how, cache)
    return head.logits(base.unembed, whole.head, how.apply_lora, h), cache


def loras(rows):
    return both_loras(
        partial(row_lora, kernels=Kernels()), jnp.zeros(rows, jnp.int32), jnp.full((1, 2), SCALE, jnp.float32)
    )


@pytest.mark.parametrize("shape", [(2, 1, 2)], ids=str)
def test_packed_rows_equal_transformers(tmp_path, shape):
    mesh, golden = make_mesh(*shape), np.load(NUMBERS)
    base, arrays, slots, adapter = loaded(tmp_path, mesh)

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(specs(base), specs(slots), jax.P(DATA), jax.P(DATA), jax.P(DATA)),
        out_specs=jax.P(DATA, None, TP),
    )
    def run(base, adapters, tokens, segments, positions):
        attend = segment_attend(Kernels(), segments)
        how = Pass(attend, *loras(1), Kernels(), sequence_parallel=True, segments=segments)
        return logits_of(base, adapters, how, tokens, positions)[0]

    tokens, segments, positions = np.zeros((3, 2, 128), np.int32)
    packed = np.concatenate(delta_model.sequences())
    tokens[1, : len(packed)] = packed
    segments[1, : len(packed)] = np.repeat([1, 2], LENGTHS)
    positions[1, : len(packed)] = np.concatenate([np.arange(length) for length in LENGTHS])
    logits = np.asarray(run(arrays, adapter, tokens, segments, positions))[1]
    for number, (start, length) in enumerate(zip((0, LENGTHS[0]), LENGTHS, strict=True)):
        expected = golden[f"logits/{number}"]
        actual = logits[start : start + length][rows_of(length)]
        np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.slow
def test_every_level_of_recomputation_leads_to_the_same_gradients(tmp_path):
    mesh = make_mesh(2, 1, 2)
    base, arrays, slots, adapter = loaded(tmp_path, mesh)
    tokens = np.tile(delta_model.sequences()[1][:80], (2, 1))
    positions = np.tile(np.arange(80, dtype=np.int32), (2, 1))

    def gradients(remat):
        @jax.jit
        @partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=(specs(base), specs(slots), jax.P(DATA), jax.P(DATA)),
            out_specs=specs(slots),
        )
        def run(base, adapters, tokens, positions):
            segments = jnp.ones_like(tokens)
            attend = segment_attend(Kernels(), segments)
            how = Pass(attend, *loras(1), Kernels(), sequence_parallel=True, remat=remat, segments=segments)

            def loss(adapters):
                logits, _ = logits_of(base, adapters, how, tokens, positions)
                return jnp.sum(jnp.sin(logits))

            return jax.grad(loss)(adapters)

        return run(arrays, adapter, tokens, positions)

    expected = jax.tree.leaves_with_path(gradients("none"))
    for level in ("light", "mlp", "full"):
        for (path, leaf), actual in zip(expected, jax.tree.leaves(gradients(level)), strict=True):
            limit = 1e-5 * np.abs(leaf).max()
            assert limit > 0, path
            np.testing.assert_allclose(actual, leaf, rtol=0, atol=limit, err_msg=str(path))


def test_prefill_and_decode_equal_transformers(tmp_path):
    mesh, golden, length = make_mesh(1, 1, 1), np.load(NUMBERS), LENGTHS[1]
    base, arrays, slots, adapter = loaded(tmp_path, mesh)
    (sizes,) = {layer.mixer for layer in MODEL.layers if isinstance(layer.mixer, DeltaRule)}
    keep = state_pool.Keep(
        cache_weights(MODEL, mesh, 8, PAGE_SIZE, jnp.float32),
        state_pool.pool_weights(sizes, mesh, MODEL.n_layers - MODEL.n_paged, 4, jnp.float32),
    )
    pages = np.arange(1, 8, dtype=np.int32)

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(specs(base), specs(slots), specs(keep), jax.P(DATA)),
        out_specs=jax.P(DATA, None, TP),
    )
    def run(base, adapters, cache, tokens):
        read, positions = tokens[:, :CUT], jnp.arange(CUT)[None]
        segments, slot = jnp.ones((1, CUT), jnp.int32), jnp.full(1, SLOT)
        attend = prefill_attend(Kernels(), segments, jnp.array(pages)[positions // PAGE_SIZE], positions)
        how = Pass(
            attend,
            *loras(1),
            Kernels(),
            sequence_parallel=True,
            segments=segments,
            slots=StateSlots(jnp.zeros_like(slot), slot, decodes=False),
        )
        logits, cache = logits_of(base, adapters, how, read, positions, cache)

        def step(cache, position):
            is_alive = jnp.ones(1, bool)
            attend = decode_attend(Kernels(), jnp.array(pages)[None], position[None], is_alive)
            how = Pass(
                attend,
                *loras(1),
                Kernels(),
                sequence_parallel=False,
                segments=jnp.ones((1, 1), jnp.int32),
                slots=StateSlots(slot, slot, decodes=True),
            )
            token = jax.lax.dynamic_slice_in_dim(tokens, position, 1, axis=1)
            logits, cache = logits_of(base, adapters, how, token, position[None, None], cache)
            return cache, logits[:, 0]

        _, later = jax.lax.scan(step, cache, jnp.arange(CUT, length))
        return jnp.concatenate([logits, later.swapaxes(0, 1)], axis=1)

    (logits,) = np.asarray(run(arrays, adapter, zeros(mesh, keep), delta_model.sequences()[1][None]))
    expected = golden["logits/1"]
    np.testing.assert_allclose(
        logits[rows_of(length)], expected, rtol=0, atol=TOLERANCE * np.abs(expected).max()
    )


def test_every_layer_is_in_its_place():
    layers = MODEL.layers
    assert [type(layer.mixer).__name__ for layer in layers] == ["DeltaRule", "Softmax"] * 2
    assert [place.numbers for place in MODEL.places] == [range(0, 4, 2), range(1, 4, 2)]
    assert [MODEL.kept_numbers(place) for place in MODEL.places] == [(0, 1), (0, 1)]


def test_every_tensor_of_the_text_model_is_read_once():
    read = dict[str, list[range]]()
    for place in MODEL.places:
        for array in MODEL.arrays(place):
            for layer in place.numbers:
                rows = array.source.rows or (0, 1 << 40, 1)
                read.setdefault(array.source.name.format(layer=layer), []).append(range(*rows))
    others = {each.name for each in (MODEL.embed, MODEL.final_norm, MODEL.head)}
    assert read.keys() | others == delta_model.shapes().keys()
    fused = read["model.language_model.layers.0.linear_attn.in_proj_qkv.weight"]
    assert fused == [range(16), range(16, 32), range(32, 64)]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"linear_num_value_heads": 3}, "3 linear_num_value_heads, not a multiple of its 2"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim to 1"),
        ({"layer_types": ["linear_attention"] * 4}, "has 4 layers of linear_attention; by layer_types"),
        ({"layer_types": ["linear_attention", "sliding_attention"] * 2}, "sliding_attention"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.2}}, "3 of 16 numbers"),
    ],
    ids=str,
)
def test_what_the_layers_cannot_be_is_refused(change, message):
    with pytest.raises(Refusal, match=message):
        qwen3_5.dense(ConfigKeys({**CONFIG, "text_config": {**TEXT, **change}}))
