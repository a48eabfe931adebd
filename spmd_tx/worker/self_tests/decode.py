"""Compares the ways in which GPUs may run a decode with the plain one, on all devices of one process.

    python -m spmd_tx.worker.self_tests.decode '{"implementations": ["graphs", "plain"], "devices": [0], ...}'

prints a Verdict for each, as self_test.py does. A way must give the plain one's bits, or with other sums its
numbers within rounding, the same bits twice, and take less time. It may end the process or hang, so
process.py starts this one. The decode is a worker's own, of a few layers with random weights.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import Array
from jax.sharding import Mesh

from spmd_tx.models.adapters.lora import adapter_weights
from spmd_tx.models.attention.kv_cache import cache_weights
from spmd_tx.models.base_weights import weights
from spmd_tx.models.declared.channels import Glu
from spmd_tx.models.declared.layers import Cycle, Layer, Norm
from spmd_tx.models.declared.mixers import Softmax
from spmd_tx.models.declared.model import Model
from spmd_tx.models.declared.rope import Rope
from spmd_tx.protocol.commands import STOP_TOKENS
from spmd_tx.protocol.kernels import PALLAS, Kernels
from spmd_tx.sharding.mesh import make_mesh, platform
from spmd_tx.sharding.weight import Weight, shardings
from spmd_tx.worker.decode_ways import ONE_SHOT, PLAIN, WAYS
from spmd_tx.worker.self_tests.verdict import MOST_ERROR, tell_verdicts, worst_error
from spmd_tx.worker.steps.decode_rows import DecodeRows, RowState
from spmd_tx.worker.steps.sample import Bank, make_decode

LAYERS, VOCABULARY, RANK, SLOTS = 4, 4096, 16, 2
ROWS, STEPS, CONTEXT = 16, 8, 64  # of each data shard
RUNS = 5  # of which the median counts
LESS = 0.98  # of the plain way's time, at most


class DecodeSizes(msgspec.Struct, frozen=True):
    """Holds the ways to try, and the sizes of the layers with which they are tried."""

    what: ClassVar[str] = "decode by"  # is tried, in messages
    implementations: list[str]  # of decode_ways.WAYS
    devices: list[int]  # among those of this process
    tp: int
    d_model: int
    d_ff: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    paged_attention: str = "reference"
    dtype: str = "bfloat16"


DecodeRun = Callable[[], tuple[np.ndarray, np.ndarray]]  # -> (tokens [K, B], log-probabilities [K, B])


def problem_of(way: str, sizes: DecodeSizes) -> str | None:
    """Say why a way must not be used; None if it is right and faster than the plain one."""
    if way == PLAIN:
        return None
    plain, run = (decode(each, sizes) for each in (PLAIN, way))
    wanted, once, again = plain(), run(), run()
    for name, want, got, second in zip(("tokens", "log-probabilities"), wanted, once, again, strict=True):
        if got.tobytes() != second.tobytes():
            return f"the {name} differ between two runs"
        if WAYS[way].keys() & ONE_SHOT.keys():
            error = worst_error(got, want)
            if not error <= MOST_ERROR:  # also true for NaN
                return f"the {name} are off by {error:.2g}"
        elif got.tobytes() != want.tobytes():
            return f"the {name} are not those of the plain way"
    spent, least = seconds(run), seconds(plain)
    if spent > LESS * least:
        return f"it takes {1e3 * spent:.2f} ms, and the plain way {1e3 * least:.2f} ms"
    return None


def seconds(run: DecodeRun) -> float:
    """Return the time of a decode."""
    spent = []
    for _ in range(RUNS):
        began = time.perf_counter()
        run()
        spent.append(time.perf_counter() - began)
    return statistics.median(spent)


def decode(way: str, sizes: DecodeSizes) -> DecodeRun:
    """Return a decode of rows whose tokens are given, so that two ways can be compared step by step."""
    devices = [jax.local_devices()[number] for number in sizes.devices]
    shards, dtype = len(devices) // sizes.tp, jnp.dtype(sizes.dtype)
    mesh = make_mesh(shards, 1, sizes.tp, devices)
    model = _model(sizes)
    base = weights(model, mesh, dtype)
    adapters = adapter_weights(model, mesh, SLOTS, RANK, dtype, zero=False)
    bank = Bank(adapters, Weight((SLOTS, 2), jax.P(), jnp.float32))
    pages_of_row = CONTEXT // sizes.page_size
    cache = cache_weights(model, mesh, 1 + ROWS * pages_of_row, sizes.page_size, dtype)
    device, products = platform(mesh), PALLAS.get(platform(mesh), "reference")
    kernels = Kernels(device, pages=sizes.paged_attention, products=products, decode=way)
    step = make_decode(model, mesh, base, bank, cache, STEPS, kernels=kernels)
    arrays = [_random(mesh, each) for each in (base, bank)]
    table = 1 + np.arange(ROWS * pages_of_row, dtype=np.int32).reshape(ROWS, pages_of_row)
    tables, rows, kept = np.tile(table, (shards, 1)), _rows(ROWS * shards), [_random(mesh, cache)]
    nothing = np.zeros(ROWS * shards, np.int32)
    previous = RowState(nothing, nothing, nothing)

    def run() -> tuple[np.ndarray, np.ndarray]:
        after = jax.tree.map(jnp.asarray, previous)
        rest = (tables, rows, None, np.int32(0), np.int32(STEPS))
        kept[0], _, drawn = step(*arrays, kept[0], previous, after, *rest)
        return np.asarray(drawn.tokens), np.asarray(drawn.logprobs)

    return run


def _model(sizes: DecodeSizes) -> Model:
    norm = Norm(1e-6)
    mixer = Softmax(sizes.heads, sizes.kv_heads, sizes.head_dim, Rope(1e6), norm.eps, qk_norm=True)
    stack = (Cycle((Layer(mixer, Glu(sizes.d_ff), norm),), LAYERS),)
    return Model("", VOCABULARY, sizes.d_model, stack, norm, CONTEXT, is_tied=True)


def _rows(count: int) -> DecodeRows:
    """Return new rows, each somewhere in its first pages; their next tokens are given."""
    random, number = np.random.default_rng(0), np.arange(count, dtype=np.int32)
    forced = random.integers(0, VOCABULARY, (count, STEPS), np.int32)
    return DecodeRows(
        source=np.full(count, -1, np.int32),
        tokens=number,
        positions=number % (CONTEXT - STEPS),
        remaining=np.full(count, STEPS, np.int32),
        slots=number % SLOTS,
        seeds=np.stack([number, number], axis=1).astype(np.uint32),
        temperatures=np.ones(count, np.float32),
        top_k=np.full(count, -1, np.int32),
        top_p=np.ones(count, np.float32),
        stop_tokens=np.full((count, STOP_TOKENS), -1, np.int32),
        forced=forced,
    )


def _random(mesh: Mesh, declared: Any) -> Any:
    """Make an array for every declared weight; norms and scales are one."""
    keys = iter(jax.random.split(jax.random.key(0), 100))

    def leaf(weight: Weight) -> Array:
        def make(key: Array) -> Array:
            if "norm" in weight.hf_name or (len(weight.shape) < 3 and weight.dtype == jnp.float32):
                return jnp.ones(weight.shape, weight.dtype)
            return 0.02 * jax.random.normal(key, weight.shape, weight.dtype)

        return jax.jit(make, out_shardings=shardings(mesh, weight))(next(keys))

    return jax.tree.map(leaf, declared)


if __name__ == "__main__":
    tell_verdicts(sys.argv[1], DecodeSizes, problem_of)
