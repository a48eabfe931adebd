"""The sampling steps: prefill and decode, jitted once per shape.

Dimension key as in protocol.py: B row (over all data shards), T token, N pages in a table, K decode step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from spmd_tx.models import head
from spmd_tx.models.config import ModelConfig
from spmd_tx.models.kv_cache import KvCache, copy_pages, decode_attend, prefill_attend
from spmd_tx.models.lora import Adapters, ApplyLora, bank_lora, row_lora
from spmd_tx.models.qwen3 import Pass, Weights, backbone
from spmd_tx.models.sampling import draw
from spmd_tx.sharding.collectives import replicate_rows, varying
from spmd_tx.sharding.mesh import DATA, TP
from spmd_tx.sharding.weight import Weight, specs
from spmd_tx.worker.train import Rows, chunked_logprobs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Bank:
    """Sampler versions by bank slot, in the compute dtype. Slot 0 is the base model: all zero."""

    w: Adapters[Any]
    scale: Any  # float32 [S]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowState:
    """What stays on the device from one decode dispatch to the next; padded to the most rows."""

    tokens: Any  # int32 [B]
    positions: Any
    remaining: Any  # 0: dead


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeRows:
    """protocol.Decode on the device."""

    source: Any  # int32 [B]
    tokens: Any  # int32 [B]
    positions: Any  # int32 [B]
    remaining: Any  # int32 [B]
    slots: Any  # int32 [B]
    seeds: Any  # uint32 [B, 2]
    temperatures: Any  # float32 [B]
    top_k: Any  # int32 [B]
    top_p: Any  # float32 [B]
    stop_tokens: Any  # int32 [B, 8]
    tables: Any  # int32 [B, N]

    def resume(self, previous: RowState) -> RowState:
        """Rows that go on keep their state, wherever they stood; the others start afresh."""
        is_fresh = self.source < 0
        index = jnp.maximum(self.source, 0)

        def pick(fresh: Array, old: Array) -> Array:
            return jnp.where(is_fresh, fresh, old[index])

        return RowState(
            pick(self.tokens, previous.tokens),
            pick(self.positions, previous.positions),
            pick(self.remaining, previous.remaining),
        )


def make_prefill(
    model: ModelConfig, mesh: Mesh, base: Weights[Weight], bank: Bank, cache: KvCache, *, logprobs: bool
) -> Callable[..., Any]:
    """(weights, bank, cache, rows, pages, copies) -> (cache, logprobs [B, T] or None); donates ``cache``."""
    in_specs = (specs(base), specs(bank), specs(cache), P(DATA), P(DATA), P(DATA))

    @partial(jax.jit, donate_argnums=2)
    @partial(jax.shard_map, mesh=mesh, in_specs=in_specs, out_specs=(specs(cache), P()))
    def prefill(
        base: Weights[Array], bank: Bank, cache: KvCache, rows: Rows, pages: Array, copies: Array
    ) -> Any:
        apply_lora = row_lora(rows.slots, bank.scale)
        adapters = jax.tree.map(varying, bank.w)
        how = Pass(prefill_attend(rows.segments, pages, rows.positions), apply_lora, sequence_parallel=True)
        h_BTD, cache = backbone(model, base, adapters, rows.tokens, rows.positions, how, cache)
        cache = copy_pages(cache, copies)
        if not logprobs:
            return cache, None
        logprobs_BT = chunked_logprobs(base.unembed, adapters.head, apply_lora, h_BTD, rows.targets)
        return cache, replicate_rows(logprobs_BT)

    return prefill


def make_decode(
    model: ModelConfig, mesh: Mesh, base: Weights[Weight], bank: Bank, cache: KvCache, max_steps: int
) -> Callable[..., Any]:
    """(weights, bank, cache, state, rows, active, steps) -> (cache, state, tokens [K, B], logprobs [K, B]).

    ``active`` int32 [A] lists the bank slots in use, and ``rows.slots`` are indices into it: every step
    reads all adapters that it is given. ``cache`` and ``state`` are donated. The cache stays in the loops'
    carries: as a scanned input it would be copied for every layer.
    """
    in_specs = (specs(base), specs(bank), specs(cache), P(DATA), P(DATA), P(), P())

    @partial(jax.jit, donate_argnums=(2, 3))
    @partial(jax.shard_map, mesh=mesh, in_specs=in_specs, out_specs=(specs(cache), P(DATA), P(), P()))
    def decode(
        base: Weights[Array],
        bank: Bank,
        cache: KvCache,
        previous: RowState,
        rows: DecodeRows,
        active: Array,
        steps: Array,
    ) -> Any:
        adapters = jax.tree.map(lambda x: varying(jnp.take(x, active, axis=x.ndim - 3)), bank.w)
        apply_lora = bank_lora(rows.slots, bank.scale[active])
        state = rows.resume(previous)
        b = rows.source.shape[0]
        tokens_KB = varying(jnp.full((max_steps, b), -1, jnp.int32), *DATA)
        logprobs_KB = varying(jnp.zeros((max_steps, b), jnp.float32), *DATA)

        def alive(state: RowState) -> Array:
            return lax.psum(jnp.sum(state.remaining > 0, dtype=jnp.int32), DATA)

        def go_on(carry: Any) -> Array:
            step, alive_rows = carry[0], carry[1]
            return (step < steps) & (alive_rows > 0)

        def step_all(carry: Any) -> Any:
            step, _, cache, state, tokens_KB, logprobs_KB = carry
            cache, state, token_B, logprob_B = _step(model, base, adapters, apply_lora, cache, state, rows)
            return (
                step + 1,
                alive(state),
                cache,
                state,
                tokens_KB.at[step].set(token_B),
                logprobs_KB.at[step].set(logprob_B),
            )

        carry = (jnp.int32(0), alive(state), cache, state, tokens_KB, logprobs_KB)
        _, _, cache, state, tokens_KB, logprobs_KB = lax.while_loop(go_on, step_all, carry)
        padded = jax.tree.map(lambda old, new: old.at[:b].set(new), previous, state)
        return cache, padded, replicate_rows(tokens_KB.T).T, replicate_rows(logprobs_KB.T).T

    return decode


def _step(
    model: ModelConfig,
    base: Weights[Array],
    adapters: Adapters[Array],
    apply_lora: ApplyLora,
    cache: KvCache,
    state: RowState,
    rows: DecodeRows,
) -> tuple[KvCache, RowState, Array, Array]:
    """Feed every living row its last token and draw the next one."""
    is_alive_B = state.remaining > 0
    positions_B = jnp.where(is_alive_B, state.positions, 0)
    how = Pass(decode_attend(rows.tables, positions_B, is_alive_B), apply_lora, sequence_parallel=False)
    tokens_B1, positions_B1 = state.tokens[:, None], positions_B[:, None]
    h_B1D, cache = backbone(model, base, adapters, tokens_B1, positions_B1, how, cache)
    local_BV = head.logits(base.unembed, adapters.head, apply_lora, h_B1D)[:, 0]
    logits_BV = lax.all_gather(local_BV, TP, axis=1, tiled=True, to="invarying")
    # The position of the token that is drawn keys its random number.
    token_B, logprob_B = draw(
        logits_BV, rows.seeds, state.positions + 1, rows.temperatures, rows.top_k, rows.top_p
    )
    is_stop_B = jnp.any(token_B[:, None] == rows.stop_tokens, axis=-1)
    remaining_B = jnp.where(is_stop_B, 0, state.remaining - 1)
    after = RowState(
        tokens=jnp.where(is_alive_B, token_B, state.tokens),
        positions=state.positions + is_alive_B.astype(jnp.int32),
        remaining=jnp.where(is_alive_B, remaining_B, 0),
    )
    return cache, after, jnp.where(is_alive_B, token_B, -1), jnp.where(is_alive_B, logprob_B, 0.0)
