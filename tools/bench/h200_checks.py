"""What h200.py checks before it measures: pages of a large pool are copied right, and kernels are correct."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import Array, lax

from spmd_tx.models.attention.kv_cache import KvCache, write
from spmd_tx.models.attention.paged.attention import candidates
from spmd_tx.protocol.kernels import Kernels, Platform, products_of
from spmd_tx.worker.self_tests import paged as paged_self_test
from spmd_tx.worker.self_tests import products as expert_self_test
from spmd_tx.worker.self_tests.attention import AttentionSizes, implementation, problem_in_sight, problem_of
from spmd_tx.worker.self_tests.products import ENCODINGS, Check, ExpertSizes
from spmd_tx.worker.steps.pages import make_copy_pages
from tools.bench.dummy import PAGE, Dummy
from tools.bench.meter import Meter

# Distances of pages whose numbers in a pool of this size are equal modulo 2**32, in some of 36 layers.
COLLIDING = (5072, 6557, 10144, 11629)
PAGES = 16701  # with 36 layers of 8 heads of width 128, 9.9e9 numbers in each pool
COPIES = 128
ROWS = 1024  # that write at once


def copies(meter: Meter, dummy: Dummy, pages: int = PAGES) -> None:
    """Copy and write random pages of pools beyond 2**32 numbers, and look at every page afterwards."""
    declared = dummy.declared_cache(pages - 1, PAGE)
    numbers = int(np.prod(declared.keys.shape))
    copy = make_copy_pages(dummy.mesh, declared)
    random = np.random.default_rng(0)
    for what, pairs in _all_copies(random, pages):
        with meter.guard(what):
            cache = jax.tree.map(lambda pool: numbered(pool, np.arange(pages)), dummy.cache(declared))
            cache = copy(cache, pairs)
            source = np.arange(pages)
            source[pairs[:, 1]] = pairs[:, 0]
            source[0] = 0  # to which copies that there are not go
            verdict(meter, f"copy_pages, {what}, pools of {numbers:.3g} numbers", cache, source)
            del cache
    with meter.guard("write"):
        cache = jax.tree.map(lambda pool: numbered(pool, np.arange(pages)), dummy.cache(declared))
        source = np.arange(pages)
        rows = random.choice(np.arange(1, pages), min(ROWS, pages - 1), replace=False).astype(np.int32)
        source[rows] = random.permutation(rows)
        cache = jax.jit(rewritten, donate_argnums=0)(cache, rows, source[rows].astype(np.int32))
        verdict(meter, f"write, pools of {numbers:.3g} numbers", cache, source)


def _all_copies(random: np.random.Generator, pages: int) -> list[tuple[str, np.ndarray]]:
    """Return pairs of pages: random ones, and targets at the distances that used to collide."""
    found = []
    usable = np.arange(1, pages)
    for number in range(3):
        count = min(COPIES - 8 * number, (pages - 1) // 2)
        chosen = random.choice(usable, 2 * count, replace=False).astype(np.int32)
        found.append((f"random {number}", _padded(chosen.reshape(2, count).T)))
    targets = [first for distance in COLLIDING for first in (1, 1 + distance) if first < pages]
    targets = list(dict.fromkeys(targets))
    others = random.choice(np.setdiff1d(usable, targets), len(targets), replace=False)
    found.append(("colliding", _padded(np.stack([others, targets], axis=1).astype(np.int32))))
    return found


def _padded(pairs: np.ndarray) -> np.ndarray:
    return np.concatenate([pairs, np.zeros((COPIES - len(pairs), 2), np.int32)])


def numbered(pool: Array, source: np.ndarray) -> Array:
    """Fill a pool [L, P, S, X] with numbers that tell layer, page and place apart."""
    return jax.jit(_content, static_argnums=0, donate_argnums=2)(pool.shape, source.astype(np.int32), pool)


def _content(shape: tuple[int, ...], source_P: Array, like: Array) -> Array:
    def layer(number: Array, pool: Array) -> Array:
        content = _layer_content(shape, number, source_P).astype(pool.dtype)
        return lax.dynamic_update_index_in_dim(pool, content, number, 0)  # no scatter: that is to be checked

    return lax.fori_loop(0, shape[0], layer, like)


def _layer_content(shape: tuple[int, ...], layer: Array, source_P: Array) -> Array:
    """Return what stands in one layer [P, S, X]: a hash of layer, page, place and number.

    It is a whole number below 256, which bfloat16 holds exactly.
    """
    place_SX = jnp.arange(np.prod(shape[2:]), dtype=jnp.uint32).reshape(shape[2:])
    word = source_P.astype(jnp.uint32)[:, None, None] * np.uint32(2654435761)
    word = (word + layer.astype(jnp.uint32) * np.uint32(40503)) ^ (place_SX * np.uint32(2246822519))[None]
    return (((word ^ (word >> 15)) * np.uint32(3266489917)) >> 24).astype(jnp.float32)


def rewritten(cache: KvCache, rows: Array, source: Array) -> KvCache:
    """Write to every place of the pages ``rows`` what the pages ``source`` had, as a decode writes tokens."""
    shape = cache.keys.shape

    def one(step: Array, cache: KvCache) -> KvCache:
        layer, place = step // shape[2], step % shape[2]
        new = _layer_content(shape, layer, source)[:, place].astype(cache.keys.dtype)
        return write(cache, layer, rows, jnp.full(rows.shape, place, jnp.int32), new, new)

    return lax.fori_loop(0, shape[0] * shape[2], one, cache)


def verdict(meter: Meter, name: str, cache: KvCache, source: np.ndarray) -> None:
    """Say how many pages of which layers are not copies of ``source``."""
    wrong = {
        pool: np.array(jax.jit(_wrong_pages)(getattr(cache, pool), source.astype(np.int32)))
        for pool in ("keys", "values")
    }
    for found in wrong.values():
        found[:, 0] = False  # nobody reads page 0
    count = sum(int(found.sum()) for found in wrong.values())
    layers = sorted({int(layer) for found in wrong.values() for layer in np.nonzero(found)[0]})
    if count:
        meter.row(name, problem=f"{count} pages are wrong, in layers {layers}")
    else:
        meter.row(name, wrong_pages=0, of=int(sum(found.size for found in wrong.values())))


def _wrong_pages(pool: Array, source_P: Array) -> Array:
    """Return which pages [L, P] differ from what they should hold."""

    def layer(number: Array) -> Array:
        wanted = _layer_content(pool.shape, number, source_P).astype(pool.dtype)
        return jnp.any(lax.dynamic_index_in_dim(pool, number, 0, keepdims=False) != wanted, axis=(1, 2))

    return lax.map(layer, jnp.arange(pool.shape[0]))


def kernels(meter: Meter, checks: dict[str, Check]) -> None:
    """Run every check, and say what is wrong with each kernel."""
    for name, check in checks.items():
        with meter.guard(name):
            problem = check()
            meter.row(name, **({"problem": problem} if problem else {"verdict": "right"}))


def checks_of(platform: Platform, attentions: list[str], is_small: bool) -> dict[str, Check]:
    """Return the checks of all kernels of a platform of JAX, which are those that its workers make."""
    found = _of_rows(attentions, is_small)
    for what, sizes in _of_pages(is_small).items():
        for name in candidates(platform, sizes.head_dim, sizes.page_size, True):
            check = partial(paged_self_test.problem_of, Kernels(pages=name), sizes)
            found[f"pages, {what}, {name}"] = check
    for what, sizes in _of_products(is_small).items():
        for name in products_of(platform):
            for kernel, check in expert_self_test.checks_of(Kernels(products=name), sizes).items():
                found[f"{what}, {kernel}, {name}"] = check
    return found


def _of_rows(attentions: list[str], is_small: bool) -> dict[str, Check]:
    rows: dict[str, Any] = {"rows": {64: [[30, 34], [1, 20, 10], []]}} if is_small else {}
    heads = _heads(is_small)
    found: dict[str, Check] = {
        f"attention, {name}": partial(problem_of, implementation(Kernels(rows=name), 0), heads, **rows)
        for name in attentions
    }
    if not is_small:
        in_sight = msgspec.structs.replace(heads, heads=64, head_dim=64, windows=(0, 128), has_sinks=True)
        for name in attentions:
            found[f"attention with windows and sinks, {name}"] = partial(
                problem_in_sight, Kernels(rows=name), in_sight
            )
    return found


def _heads(is_small: bool) -> AttentionSizes:
    """Return the sizes of attention of Qwen3-8B, or small ones."""
    return AttentionSizes([], *((4, 2, 16) if is_small else (32, 8, 128)))


def _of_pages(is_small: bool) -> dict[str, AttentionSizes]:
    """Return sizes of attention to pages: of Qwen3, of gpt-oss, and of latent attention."""
    heads = msgspec.structs.replace(_heads(is_small), page_size=PAGE)
    in_sight = {"windows": (0, 32 if is_small else 128), "has_sinks": True}
    of_sight, latent = ((4, 2, 16), (4, 1, 48)) if is_small else ((64, 8, 64), (20, 1, 576))
    return {
        "whole rows": heads,
        "windows and sinks": AttentionSizes([], *of_sight, page_size=PAGE, **in_sight),
        "latent": AttentionSizes([], *latent, page_size=PAGE, keeps_values=False),
    }


def _of_products(is_small: bool) -> dict[str, ExpertSizes]:
    """Return sizes of experts of Qwen3-30B-A3B, and of packed ones, and of Qwen3.5-9B's layers."""
    experts = ExpertSizes([], 4, 64, 32) if is_small else ExpertSizes([], 16, 2048, 768)
    packed = {
        f"{name} experts": msgspec.structs.replace(experts, encoding=name, group=32) for name in ENCODINGS
    }
    widths = (16, 16) if is_small else (128, 128)
    linear = ExpertSizes([], 2, *((64, 32) if is_small else (4096, 12288)), memory=widths, is_mixture=False)
    return {"experts": experts, **packed, "dense": linear}
