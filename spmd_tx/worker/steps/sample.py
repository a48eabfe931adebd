"""The sampling steps: prefill and decode, jitted once per shape.

Dimension key as in protocol/commands.py: B row (over all data shards), T token, N pages in a table,
K decode step.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from spmd_tx.models import head, mtp
from spmd_tx.models.adapters.grouped_lora import grouped_lora, places
from spmd_tx.models.adapters.lora import Adapters, ApplyLora, ExpertAdapters, bank_lora, each_lora
from spmd_tx.models.adapters.row_lora import row_lora
from spmd_tx.models.attention import window_ring
from spmd_tx.models.attention.kv_cache import KvCache, continue_attend, decode_attend, prefill_attend
from spmd_tx.models.attention.paged.attention import sharing
from spmd_tx.models.backbone import backbone
from spmd_tx.models.base_weights import Weights
from spmd_tx.models.declared.model import Model
from spmd_tx.models.forward_pass import Attend, Pass, StateSlots
from spmd_tx.models.grammar_draw import GrammarRows
from spmd_tx.models.linear_attention.state_pool import NOTHING, Keep, bring_home, pages_of
from spmd_tx.models.sampling import TOGETHER, draw, draw_split, filters, tempered, tempered_by
from spmd_tx.models.stack_product import StackedMap, stacked_maps
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.collectives import from_first, replicate_rows, varying
from spmd_tx.sharding.mesh import DATA, TP
from spmd_tx.sharding.tree_node import TreeNode
from spmd_tx.sharding.weight import Weight, specs
from spmd_tx.worker.decode_ways import options_of
from spmd_tx.worker.steps.decode_rows import DecodeRows, RowState
from spmd_tx.worker.steps.drawn import Drawn, compact
from spmd_tx.worker.steps.prompt_scores import ScoreInputs, Widths, chunked_scores
from spmd_tx.worker.steps.speculate import Speculation
from spmd_tx.worker.steps.train import Rows, adapted_logits, both_loras, chunked_logprobs


class Bank(TreeNode):
    """Holds sampler versions by bank slot, in the compute dtype. Slot 0, the base model, is zero."""

    w: Adapters[Any]
    scale: Any  # float32 [S, 2], as in TrainState


def make_prefill(
    model: Model,
    mesh: Mesh,
    base: Weights[Weight],
    bank: Bank,
    cache: KvCache | Keep,
    *,
    logprobs: bool,
    widths: Widths | None = None,
    kernels: Kernels = Kernels(),
) -> Callable[..., Any]:
    """Make (weights, bank, cache, rows, pages, tables, inputs) -> (cache, scores, experts).

    ``tables`` is None, or int32 [B, N] for rows that continue after what their pages hold. ``scores`` are
    the reply's arrays by name: ``logprobs`` [B, T] if wanted, and with ``widths`` those of chunked_scores;
    without, ``inputs`` is None. ``experts`` [B, T, L, k] are those used; None without any. ``cache`` is
    donated.
    """
    in_specs = (specs(base), specs(bank), specs(cache), *[P(DATA)] * 4)

    @partial(jax.jit, donate_argnums=2)
    @partial(jax.shard_map, mesh=mesh, in_specs=in_specs, out_specs=(specs(cache), P(), P()))
    def prefill(
        base: Weights[Array],
        bank: Bank,
        cache: KvCache | Keep,
        rows: Rows,
        pages: Array,
        tables: Array | None,
        inputs: ScoreInputs | None,
    ) -> Any:
        loras = both_loras(partial(row_lora, kernels=kernels), rows.slots, bank.scale)
        adapters = jax.tree.map(varying, bank.w)
        attend = prefill_attend(kernels, rows.segments, pages, rows.positions)
        if tables is not None:
            attend = continue_attend(kernels, tables, pages, rows.positions)
        slots = attend_window = None
        if rows.state_sources is not None:
            slots = StateSlots(rows.state_sources, rows.state_targets, decodes=False)
        if slots is not None and model.window:
            sight = model.window, rows.segments, rows.positions, slots
            attend_window = window_ring.prefill_attend(kernels, *sight)
            if tables is not None:
                attend_window = window_ring.continue_attend(kernels, *sight)
        how = Pass(
            attend,
            *loras,
            sequence_parallel=True,
            experts=rows.experts,
            kernels=kernels,
            segments=rows.segments,
            places=rows.places,
            slots=slots,
            attend_window=attend_window,
        )
        h_BTD, cache, experts_BTLC = backbone(model, base, adapters, rows.tokens, rows.positions, how, cache)
        if model.mtp is not None:
            _, cache = mtp.read(model, base, adapters, h_BTD, rows.targets, rows.positions, how, cache)
        if experts_BTLC is not None:
            # All devices of tp chose the same; the maximum only marks it as replicated.
            experts_BTLC = replicate_rows(compact(model, lax.pmax(experts_BTLC, TP)))
        if not logprobs:
            return cache, {}, experts_BTLC
        unembed = head.whole(base.unembed, model.d_model)
        logits_of = partial(adapted_logits(unembed, how.apply_lora), adapters.head)
        if widths is None or inputs is None:
            logprobs_BT = chunked_logprobs(logits_of, h_BTD, rows.targets)
            return cache, {"logprobs": replicate_rows(logprobs_BT)}, experts_BTLC
        scores = chunked_scores(widths, logits_of, h_BTD, rows, inputs)
        return cache, jax.tree.map(replicate_rows, scores), experts_BTLC

    return prefill


def make_decode(
    model: Model,
    mesh: Mesh,
    base: Weights[Weight],
    bank: Bank,
    cache: KvCache | Keep,
    max_steps: int,
    top: int = 0,
    *,
    kernels: Kernels = Kernels(),
    batch_invariant: bool = False,
) -> Callable[..., Any]:
    """Make (weights, bank, cache, previous, after, tables, rows, active, first, steps).

    It returns (cache, after, Drawn).

    ``previous`` is the state that the last Decode left; that of these rows is written into ``after``, from
    row ``first`` of every data shard on. They are two because several calls, one for each block of rows, may
    read any row of the last Decode. ``tables`` int32 [most rows, N] has the pages of these rows from row
    ``first`` of every data shard on. Drawn is [K, B, ...].

    ``active`` int32 [A] lists the bank slots in use, and ``rows.slots`` are indices into it: every step
    reads all adapters in it. None: the whole bank. ``cache`` and ``after`` are donated. The cache is carried
    through the loops: as a scanned input it would be copied for every layer.

    With ``batch_invariant`` what a row draws depends on the number of rows, but neither on the other rows,
    nor on its place or the slot of its adapter; ``active`` must be None.
    """
    in_specs = (specs(base), specs(bank), specs(cache), *[P(DATA)] * 4, P(), P(), P())
    is_cpu = kernels.platform == "cpu"
    apply = each_lora if batch_invariant else bank_lora
    # Where devices of tp share one memory, whole logits cost them nothing.
    splits_draw = mesh.shape[TP] > 1 and not is_cpu

    @partial(jax.jit, donate_argnums=(2, 4), compiler_options=options_of(kernels.decode) or None)
    @partial(jax.shard_map, mesh=mesh, in_specs=in_specs, out_specs=(specs(cache), P(DATA), P()))
    def decode(
        base: Weights[Array],
        bank: Bank,
        cache: KvCache | Keep,
        previous: RowState,
        after: RowState,
        tables: Array,
        rows: DecodeRows,
        active: Array | None,
        first: Array,
        steps: Array,
    ) -> Any:
        slots, part_tokens = rows.slots, 0
        if rows.chunk is not None:
            part_tokens = rows.chunk.part_tokens
            slots = jnp.concatenate([slots, jnp.repeat(rows.chunk.slots, part_tokens)])
        adapters, loras = _adapters(model, bank, slots, active, apply, grouped=is_cpu)
        of_head = loras[0]
        if rows.chunk is not None:
            _, (of_head, _) = _adapters(model, bank, rows.slots, active, apply, grouped=is_cpu)
        stacked_map = None
        if kernels.has_gpu_products:
            scale_S2 = bank.scale if active is None else bank.scale[active]
            stacked_map = stacked_maps(slots, scale_S2[:, 0], loras[0], interpret=kernels.interpret)
        state = rows.resume(previous)
        b = rows.source.shape[0]
        tables_BN = lax.dynamic_slice_in_dim(tables, first, b)
        guess = None
        if rows.drafts is not None:
            expects = model.mtp is not None
            begun = Speculation.begin(rows.drafts, rows.depths, rows.states, expects=expects)
            guess = jax.tree.map(lambda x: varying(x, *DATA), begun)
            tables_BN = tables_BN[guess.leaders]
            state = state.replace(remaining=jnp.where(rows.depths == 0, state.remaining, 0))
        has_filter_B = filters(rows.temperatures, rows.top_k, rows.top_p, model.vocab_size)
        any_filters = lax.psum(jnp.sum(has_filter_B, dtype=jnp.int32), DATA) > 0 if splits_draw else None
        queries = b, model.n_heads // mesh.shape[TP], model.head_dim
        shares = partial(sharing, kernels, queries, pages_of(cache).keys)
        attend = partial(decode_attend, kernels, tables_BN, sharing=shares)
        in_window = partial(window_ring.decode_attend, kernels, model.window)
        has_masks = rows.masks is not None
        nothing = Drawn.none(
            model,
            (max_steps, b),
            top,
            has_masks=has_masks,
            has_drafts=model.mtp is not None and guess is not None,
            chunk=part_tokens,
        )
        drawn = jax.tree.map(lambda x: varying(x, *DATA), nothing)

        def alive(state: RowState) -> Array:
            return lax.psum(jnp.sum(state.remaining > 0, dtype=jnp.int32), DATA)

        def go_on(carry: Any) -> Array:
            step, alive_rows = carry[0], carry[1]
            return (step < steps) & ((alive_rows > 0) if rows.chunk is None else True)

        def step_all(carry: Any) -> Any:
            step, _, cache, state, guess, drawn = carry
            read = state if guess is None else guess.spread(state)
            chunk = None if rows.chunk is None else rows.chunk.part(step)
            now = rows.replace(chunk=chunk, states=rows.states if guess is None else guess.slots)
            inputs = (model, base, adapters, (*loras, of_head), cache, read)
            how = (attend, in_window), stacked_map, kernels, top, any_filters
            cache, state, one = _step(*inputs, now, rows.grammar(step), *how)
            if guess is not None:
                guess, state, tokens_B = guess.settle(read, state, one.tokens, one.drafts)
                one = one.replace(tokens=tokens_B)
            drawn = jax.tree.map(lambda all_steps, new: all_steps.at[step].set(new), drawn, one)
            return step + 1, alive(state), cache, state, guess, drawn

        carry = (jnp.int32(0), alive(state), cache, state, guess, drawn)
        _, _, cache, state, guess, drawn = lax.while_loop(go_on, step_all, carry)
        cache = cache if guess is None else bring_home(cache, guess.slots, rows.states, guess.depths)
        after = jax.tree.map(lambda x, new: lax.dynamic_update_slice(x, new, (first,)), after, state)
        return cache, after, jax.tree.map(lambda x: replicate_rows(x.swapaxes(0, 1)).swapaxes(0, 1), drawn)

    return decode


def _adapters(
    model: Model,
    bank: Bank,
    slots_B: Array,
    active: Array | None,
    apply: Callable[[Array, Array], ApplyLora],
    *,
    grouped: bool,
) -> tuple[Adapters[Any], tuple[ApplyLora, ExpertAdapters]]:
    """Return the adapters in use, or the whole bank, and how they apply to rows and in experts."""
    w, scale_S2 = jax.tree.map(varying, bank.w), bank.scale
    if active is not None:
        w, scale_S2 = jax.tree.map(lambda x: jnp.take(x, active, axis=x.ndim - 3), w), scale_S2[active]
    loras = both_loras(apply, slots_B, scale_S2)
    if active is not None or not grouped:
        return w, loras
    return places(model, w), (grouped_lora(w, slots_B, scale_S2[:, 0]), loras[1])


def _step(
    model: Model,
    base: Weights[Array],
    adapters: Adapters[Array],
    loras: tuple[ApplyLora, ExpertAdapters, ApplyLora],
    cache: KvCache | Keep,
    state: RowState,
    rows: DecodeRows,
    grammar: GrammarRows | None,
    attends: tuple[Callable[..., Attend], Callable[..., Attend]],
    stacked_map: StackedMap | None,
    kernels: Kernels,
    top: int,
    any_filters: Array | None,
) -> tuple[KvCache | Keep, RowState, Drawn]:
    """Feed every live row its last token and draw the next one, as its grammar allows.

    ``rows`` have the part of a chunk that is read beside them. ``loras`` end with that of the head, which is
    for the rows alone. ``attends`` make attention to pages, and to rings of layers with a window.
    ``any_filters`` as in draw_split; None: tokens are drawn from whole logits, by every device of tp.
    """
    is_alive_B = state.remaining > 0
    positions_B = jnp.where(is_alive_B, state.positions, 0)
    tokens_B1, positions_B1, shifts_B = state.tokens[:, None], positions_B[:, None], rows.shifts
    count, chunk = positions_B.shape[0], rows.chunk
    attend = attends[0](positions_B, is_alive_B, chunk=chunk)
    if chunk is not None:
        tokens_B1 = jnp.concatenate([tokens_B1, chunk.tokens.T])
        positions_B1 = jnp.concatenate([positions_B1, jnp.maximum(chunk.positions, 0).T])
        shifts_B = None if shifts_B is None else jnp.pad(shifts_B, (0, chunk.tokens.shape[1]))
    slots = segments_B1 = attend_window = None
    if rows.states is not None:
        targets_B = jnp.where(is_alive_B, rows.states, NOTHING)
        depths_B = None if rows.depths is None else jnp.where(is_alive_B, rows.depths, 0)
        slots = StateSlots(rows.states, targets_B, decodes=True, depths_B=depths_B)
        segments_B1 = jnp.ones_like(tokens_B1)
        attend_window = attends[1](slots, positions_B, is_alive_B) if model.window else None
    places_B1 = None if shifts_B is None else positions_B1 + shifts_B[:, None]
    of_layers, of_experts, of_head = loras
    how = Pass(
        attend,
        of_layers,
        of_experts,
        sequence_parallel=False,
        stationary=True,
        stacked_map=stacked_map,
        kernels=kernels,
        segments=segments_B1,
        places=places_B1,
        slots=slots,
        attend_window=attend_window,
    )
    h_B1D, cache, experts_B1LC = backbone(model, base, adapters, tokens_B1, positions_B1, how, cache)
    local_BV = head.logits(base.unembed, adapters.head, of_head, h_B1D[:count])[:, 0]
    # The drawn token's position keys its random number.
    draws_B = (rows.seeds, state.positions + 1, rows.temperatures, rows.top_k, rows.top_p)
    top_tokens_BK = top_logprobs_BK = highest_BK = None
    if top:
        top_tokens_BK, highest_BK = head.top_logits(local_BV, top)
    if any_filters is not None:
        token_B, logprob_B, is_redrawn_B, log_total_B = draw_split(local_BV, *draws_B, any_filters, grammar)
        if highest_BK is not None:
            top_logprobs_BK = tempered_by(highest_BK, rows.temperatures, log_total_B)
    else:
        logits_BV = lax.all_gather(local_BV, TP, axis=1, tiled=True, to="invarying")
        together = 1 if kernels.platform == "cpu" else TOGETHER
        token_B, logprob_B, is_redrawn_B = draw(logits_BV, *draws_B, together, grammar)
        # Devices that round differently could draw differently: then their keys and values would no longer be
        # of one sequence, and if only some of them saw a stop token, they would wait for each other forever.
        token_B = from_first(token_B, TP)
        if highest_BK is not None:
            top_logprobs_BK = tempered(highest_BK, logits_BV, rows.temperatures)
    draft_B = None
    if model.mtp is not None:
        next_B = token_B if chunk is None else jnp.concatenate([token_B, chunk.following[0]])
        read = h_B1D, next_B[:, None], positions_B1, how, cache
        ahead_B1D, cache = mtp.read(model, base, adapters, *read)
        if rows.drafts is not None:
            ahead_BV = head.logits(base.unembed, adapters.head, of_head, ahead_B1D[:count])[:, 0]
            draft_B = head.top_logits(ahead_BV, 1)[0][:, 0]
    is_stop_B = jnp.any(token_B[:, None] == rows.stop_tokens, axis=-1)
    remaining_B = jnp.where(is_stop_B, 0, state.remaining - 1)
    after = RowState(
        tokens=jnp.where(is_alive_B, token_B, state.tokens),
        positions=state.positions + is_alive_B.astype(jnp.int32),
        remaining=jnp.where(is_alive_B, remaining_B, 0),
    )
    experts_BLC = None if experts_B1LC is None else compact(model, experts_B1LC[:, 0])
    drawn = Drawn(
        tokens=jnp.where(is_alive_B, token_B, -1),
        logprobs=jnp.where(is_alive_B, logprob_B, 0.0),
        experts=None if experts_BLC is None else experts_BLC[:count],
        chunk_experts=None if experts_BLC is None or chunk is None else experts_BLC[count:],
        redrawn=is_redrawn_B,
        top_tokens=top_tokens_BK,
        top_logprobs=top_logprobs_BK,
        drafts=draft_B,
    )
    return cache, after, drawn
