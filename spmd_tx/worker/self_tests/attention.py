"""Compares implementations of attention with the reference, on the device, in a separate process.

    python -m spmd_tx.worker.self_tests.attention '{"heads": 32, "kv_heads": 8, "head_dim": 128, ...}'

prints a Verdict per implementation, as a line of JSON, as soon as it is known. A broken implementation may
end the process, which process.py starts.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from spmd_tx.models.attention.packed_rows import segment_attention
from spmd_tx.protocol.commands import SEGMENTS_PER_ROW
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.mesh import DATA, TP
from spmd_tx.worker.self_tests import paged as paged_self_test
from spmd_tx.worker.self_tests.verdict import mesh_of, problem_between, tell_verdicts

# The lengths of rows' segments; the rest of a row is padding.
ROWS = {
    512: [[512], [100, 93, 319], [1, 7, 130, 200], [7] * SEGMENTS_PER_ROW, []],
    2048: [[1500, 37, 500], [2048]],
}
NAMES = ("output", "gradient of the queries", "gradient of the keys", "gradient of the values")


class AttentionSizes(msgspec.Struct, frozen=True):
    """Holds the sizes of attention on one device."""

    implementations: list[str]
    heads: int
    kv_heads: int
    head_dim: int
    device: int = 0  # among those of this process
    page_size: int = 0  # tokens, for attention to pages; 0: to whole rows
    windows: tuple[int, ...] = (0,)  # tokens that layers see; 0: all
    has_sinks: bool = False
    keeps_values: bool = True  # whether pages keep values; else the keys are the values, too

    @property
    def what(self) -> str:
        """Names what is tried, in messages."""
        return "paged attention" if self.page_size else "attention"


AttendRows = Callable[[Array, Array, Array, Array], Array]  # query, key, value and segments of whole rows


def problem_in_sight(kernels: Kernels, sizes: AttentionSizes) -> str | None:
    """Say what problem_of does, of the windows and sinks that layers have."""
    for window in sizes.windows:
        sight = paged_self_test.sight_of(window, sizes)
        problem = problem_of(implementation(kernels, sizes.device, **sight), sizes, **sight)
        if problem is not None:
            return f"{problem} in a window of {window} tokens" if window else problem
    return None


def problem_of(
    attend: AttendRows, sizes: AttentionSizes, rows: dict[int, list[list[int]]] = ROWS, **sight: Any
) -> str | None:
    """Say why an implementation must not be used; None if it is correct and gives the same bits twice."""
    run = with_gradients(attend)
    for length, lengths in rows.items():
        segments, arrays = _inputs(sizes, length, lengths)
        with jax.default_matmul_precision("highest"):
            reference = with_gradients(implementation(Kernels(), sizes.device, **sight))
            exact = jax.device_get(reference(segments, *(x.astype(jnp.float32) for x in arrays)))
        once, again = (jax.device_get(run(segments, *arrays)) for _ in range(2))
        for name, want, got, second in zip(NAMES, exact, once, again, strict=True):
            if problem := problem_between(name, got, want, second):
                return f"{problem} in rows of {length} tokens"
    return None


def implementation(kernels: Kernels, device: int, **sight: Any) -> AttendRows:
    """Return attention as the steps use it: inside shard_map, on one device."""
    mesh = mesh_of(device)
    heads = P(DATA, None, TP)

    @partial(jax.shard_map, mesh=mesh, in_specs=(heads, heads, heads, P(DATA)), out_specs=heads)
    def attend(q_BTNE: Array, k_BTKE: Array, v_BTKE: Array, segments_BT: Array) -> Array:
        return segment_attention(kernels, segments_BT)(q_BTNE, k_BTKE, v_BTKE, **sight)

    return attend


def with_gradients(attend: AttendRows) -> Callable[..., Any]:
    """Jit (segments, query, key, value, gradient of the output) -> (output, gradients of the three)."""

    def run(segments_BT: Array, q: Array, k: Array, v: Array, cotangent: Array) -> tuple[Array, ...]:
        out, pull_back = jax.vjp(lambda q, k, v: attend(q, k, v, segments_BT), q, k, v)
        return out, *pull_back(cotangent)

    return jax.jit(run)


def _inputs(sizes: AttentionSizes, length: int, rows: list[list[int]]) -> tuple[np.ndarray, list[Array]]:
    """Make segments [B, T], and random queries, keys, values and gradients of the output."""
    segments = np.zeros((len(rows), length), np.int32)
    for row, lengths in enumerate(rows):
        segments[row, : sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    random = np.random.default_rng(length)
    heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads)
    shapes = [(len(rows), length, n, sizes.head_dim) for n in heads]
    return segments, [jnp.asarray(random.standard_normal(s, np.float32), jnp.bfloat16) for s in shapes]


def _problem_of(name: str, sizes: AttentionSizes) -> str | None:
    problem = paged_self_test.problem_of if sizes.page_size else problem_in_sight
    return problem(Kernels(rows=name, pages=name), sizes)


if __name__ == "__main__":
    tell_verdicts(sys.argv[1], AttentionSizes, _problem_of)
