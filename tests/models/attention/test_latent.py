"""Latent attention equals that of transformers, expanded as in training and over pages as in decode."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.models.attention.blockwise import attend_segments
from spmd_tx.models.attention.kv_cache import KvCache, cache_weights, copy_pages, write
from spmd_tx.models.attention.latent import absorb, compress, expand, expand_result, place_queries
from spmd_tx.models.attention.paged.attention import paged_attention
from spmd_tx.models.declared.latent import Latent
from spmd_tx.models.families.keys import ConfigKeys
from spmd_tx.models.families.registry import declare
from spmd_tx.models.families.rope import read_rope
from spmd_tx.models.layers import rms_norm
from spmd_tx.sharding.mesh import abstract_mesh, make_mesh
from tests.golden.families import CONFIGS
from tests.golden.parts import LATENT, PARTS, TOKENS
from tests.support.kernels import kernels_of

pytestmark = pytest.mark.usefixtures("quickly_compiled")

GOLDEN = np.load(PARTS)
DEEPSEEK = declare(CONFIGS["deepseek_v3"])
PAGE = 4  # tokens
TOLERANCE = 1e-5  # relative to the largest result


def declared(name: str) -> Latent:
    config = LATENT[name].config
    width = config["qk_rope_head_dim"]
    return Latent(
        heads=config["num_attention_heads"],
        q_rank=config["q_lora_rank"] or 0,
        kv_rank=config["kv_lora_rank"],
        nope=config["qk_nope_head_dim"],
        rope_width=width,
        value=config["v_head_dim"],
        rope=read_rope(ConfigKeys(config), width, rotated=width, is_interleaved=True),
    )


@cache
def inputs(name: str):
    """The declaration, the weights [in, out], queries before their positions, and the pages."""
    latent, case = declared(name), LATENT[name]
    w = {key.removesuffix(".weight"): value.T for key, value in case.weights.items()}

    @jax.jit
    def queries_and_pages(w, x, positions):
        if latent.q_rank:
            queries = rms_norm(x @ w["q_a_proj"], w["q_a_layernorm"], latent.eps) @ w["q_b_proj"]
        else:
            queries = x @ w["q_proj"]
        queries = queries.reshape(1, TOKENS, latent.heads, latent.query_width)
        queries = place_queries(latent, queries, positions)
        return queries, compress(latent, x @ w["kv_a_proj_with_mqa"], w["kv_a_layernorm"], positions)

    w = jax.tree.map(jnp.asarray, w)
    return latent, w, *queries_and_pages(w, jnp.asarray(case.inputs)[None], jnp.asarray(case.positions)[None])


def check(name, y_BTNV, o):
    found, expected = np.asarray(y_BTNV).reshape(TOKENS, -1) @ o, GOLDEN[f"attention/{name}"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("name", LATENT)
def test_expanded_keys_and_values_give_what_transformers_does(name):
    latent, w, queries, pages = inputs(name)

    @jax.jit
    def attend(queries, pages, w):
        keys, values = expand(latent, pages, w)
        return attend_segments(queries, keys, values, jnp.ones((1, TOKENS), jnp.int32), scale=latent.scale)

    check(name, attend(queries, pages, w["kv_b_proj"]), w["o_proj"])


@pytest.mark.parametrize("name", LATENT)
def test_pages_alone_give_what_transformers_does(name):
    latent, w, queries, pages = inputs(name)

    @jax.jit
    @jax.shard_map(mesh=make_mesh(1, 1, 1), in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    def attend(queries, pages, w):
        queries = absorb(latent, queries, w)
        pool = jnp.pad(pages[0], ((0, -TOKENS % PAGE), (0, 0))).reshape(1, -1, PAGE, latent.width)
        table, positions = jnp.arange(pool.shape[1])[None], jnp.arange(TOKENS)[None]
        at_once = paged_attention(
            kernels_of("reference"), queries, (pool, None), jnp.int32(0), table, positions
        )
        tables, rows = jnp.tile(table, (TOKENS, 1)), queries.swapaxes(0, 1)
        each = paged_attention(
            kernels_of("row_by_row"), rows, (pool, None), jnp.int32(0), tables, positions.T
        )
        found = at_once, each.swapaxes(0, 1)
        return [expand_result(latent, y[..., : latent.kv_rank], w) for y in found]

    for y in attend(queries, pages, w["kv_b_proj"]):
        check(name, y, w["o_proj"])


def test_the_cache_keeps_pages_once():
    declared = cache_weights(DEEPSEEK, abstract_mesh(1, 1, 1), 5, PAGE, jnp.float32)
    assert declared.values is None
    assert declared.keys.shape == (3, 5, PAGE, 16 + 8)
    cache = KvCache(jnp.zeros(declared.keys.shape), None)
    new = np.arange(48, dtype=np.float32).reshape(2, 1, 24)
    cache = jax.jit(write)(cache, np.int32(1), np.int32([4, 2]), np.int32([0, 1]), new, new)
    keys = np.asarray(jax.jit(copy_pages)(cache, np.int32([[4, 3], [0, 0]])).keys)
    for page, place, row in ((4, 0, 0), (2, 1, 1), (3, 0, 0)):
        assert np.array_equal(keys[1, page, place], new[row, 0])


def test_the_declaration_names_the_tensors_of_the_module():
    for name, case in LATENT.items():
        arrays = declared(name).arrays(64, "layer.")
        found = {array.source.name.removeprefix("layer.self_attn."): array for array in arrays}
        assert found.keys() == case.shapes.keys()
        for key, shape in case.shapes.items():
            array = found[key]
            width_in, width_out = getattr(array, "width_in", None), getattr(array, "width_out", None)
            assert shape == ((width_out, width_in) if width_in else array.shape)


def test_a_page_keeps_one_vector_for_all_heads():
    latent = declared("deepseek")
    assert (latent.pools, latent.width) == (1, 16 + 8)
    assert latent.scale == pytest.approx(16**-0.5 * (0.1 * 0.7 * np.log(40) + 1) ** 2)
