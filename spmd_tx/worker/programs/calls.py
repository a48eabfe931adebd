"""The program and arguments of each command, both to run it and to compile it ahead."""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_tx.models.adapters import lora
from spmd_tx.protocol import commands
from spmd_tx.protocol.commands import AdapterSpec, active_sizes
from spmd_tx.protocol.setup import Setup
from spmd_tx.worker.blocks import blocks
from spmd_tx.worker.memory.plan import Plan
from spmd_tx.worker.programs.call import Call
from spmd_tx.worker.programs.tables import table_changes
from spmd_tx.worker.state import WorkerState
from spmd_tx.worker.steps.adapters import make_adapter_steps
from spmd_tx.worker.steps.losses import TokenLossInputs
from spmd_tx.worker.steps.optimizer import AdamWInputs, make_optim_step
from spmd_tx.worker.steps.pages import make_copy_pages, make_copy_states, make_place_tables
from spmd_tx.worker.steps.prompt_scores import ScoreInputs, Widths
from spmd_tx.worker.steps.sample import DecodeRows, make_decode, make_prefill
from spmd_tx.worker.steps.swap import make_page_in, make_swap_steps
from spmd_tx.worker.steps.train import Rows, make_forward, make_forward_backward


class Calls:
    """Makes the calls of an engine's steps. ``state`` is the worker's, or has ShapeDtypeStructs."""

    def __init__(self, plan: Plan, setup: Setup, mesh: Mesh, declared: WorkerState) -> None:
        model, kernels = plan.sizes.model, setup.kernels
        self._plan, self._setup, self._model = plan, setup, model
        self._shards = plan.sizes.data_shards
        self._make_training(mesh, declared)
        sampling = (model, mesh, declared.base, declared.bank, declared.cache)
        prefill = partial(make_prefill, *sampling, kernels=kernels)
        self._prefill = cache(lambda logprobs, widths: prefill(logprobs=logprobs, widths=widths))
        decode, invariant = partial(make_decode, *sampling, setup.decode_steps), setup.batch_invariant
        self._decode = cache(lambda top: decode(top, kernels=kernels, batch_invariant=invariant))
        self._copy_pages = make_copy_pages(mesh, declared.cache)
        self._copy_states = make_copy_states(mesh, declared.cache)
        self._place_tables = make_place_tables(mesh, declared.tables)
        self._gather = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))

    def _make_training(self, mesh: Mesh, declared: WorkerState) -> None:
        """Make the steps of what is trained."""
        model, kernels = self._model, self._setup.kernels
        training = (model, mesh, declared.base, declared.train)
        self._forward = make_forward(*training, kernels=kernels)
        self._forward_backward = {
            level: make_forward_backward(*training, level, kernels=kernels) for level in self._plan.levels
        }
        self._optim_step = make_optim_step(model, mesh, declared.train)
        self._adapters = make_adapter_steps(model, mesh, declared.train, declared.bank)
        self._swap = make_swap_steps(mesh, declared.train)
        self._page_out = make_swap_steps(mesh, declared.bank.w).out
        self._page_in = make_page_in(mesh, declared.bank)

    def create_adapter(self, state: WorkerState, command: commands.CreateAdapter) -> Call:
        adapter, seed = command.adapter, command.seed
        seed_2 = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
        groups = np.array([adapter.train_attn, adapter.train_mlp, adapter.train_unembed])
        rest = (_i32(command.slot), seed_2, self._ranks(adapter), self._scale(adapter), groups)
        return Call("create_adapter", (), self._adapters.create, (state.train,), rest=rest)

    def forward_backward(self, state: WorkerState, command: commands.ForwardBackward) -> Iterator[Call]:
        """Yield the call of each block. It takes the gradient that the one before has left in ``state``."""
        name, shape = self._program(command)
        step = self._forward_backward[self._plan.level(shape[0] // self._shards, shape[1])]
        batch = self._batch(command.rows, command.loss)
        for block in blocks(batch, self._shards, command.block):
            yield Call(name, shape, step, self._differentiated(state), block)

    def forward(self, state: WorkerState, command: commands.Forward) -> Iterator[Call]:
        """Yield the call of each block."""
        name, shape = self._program(command)
        for block in blocks(self._batch(command.rows, command.loss), self._shards, command.block):
            yield Call(name, shape, self._forward, self._evaluated(state), block)

    def _differentiated(self, state: WorkerState) -> tuple[Any, ...]:
        """Return the arrays of forward_backward."""
        train = state.train
        return state.base, train.w, train.grad_sum, train.scale

    def _evaluated(self, state: WorkerState) -> tuple[Any, ...]:
        """Return the arrays of forward."""
        return state.base, state.train.w, state.train.scale

    def _program(self, command: commands.Forward | commands.ForwardBackward) -> tuple[str, tuple[int, ...]]:
        """Return the name of a command's program and its shape, which depend on the arrays that it has."""
        step = "forward" if isinstance(command, commands.Forward) else "forward_backward"
        name = step if command.loss.ratio_mask is None else f"{step} of sequences"
        rows, *rest = command.rows.targets.shape
        return name, (self._shards * command.block or rows, *rest)

    def optim_step(self, state: WorkerState, command: commands.OptimStep) -> Call:
        rest = (_i32(command.slot), adamw_inputs(command))
        return Call("optim_step", (), self._optim_step, (state.train,), rest=rest)

    def read_adapter(self, state: WorkerState, slot: int) -> Call:
        return Call("read_adapter", (), self._adapters.read, (state.train,), rest=(_i32(slot),))

    def write_adapter(self, state: WorkerState, slot: int, content: Any, adapter: AdapterSpec) -> Call:
        rest = (_i32(slot), self._scale(adapter))
        return Call("write_adapter", (), self._adapters.write, (state.train, content), rest=rest)

    def swap_out(self, state: WorkerState, slot: int) -> Call:
        return Call("swap_out", (), self._swap.out, (state.train,), rest=(_i32(slot),))

    def swap_in(self, state: WorkerState, slot: int, vector: Any) -> Call:
        return Call("swap_in", (), self._swap.back, (state.train, vector), rest=(_i32(slot),))

    def weights_of_slot(self, state: WorkerState, slot: int) -> Call:
        return Call("weights_of_slot", (), self._adapters.weights_of, (state.train.w,), rest=(_i32(slot),))

    def weights_of_bank(self, state: WorkerState, bank: int) -> Call:
        return Call("weights_of_bank", (), self._adapters.weights_of, (state.bank.w,), rest=(_i32(bank),))

    def page_out(self, state: WorkerState, bank: int) -> Call:
        return Call("page_out", (), self._page_out, (state.bank.w,), rest=(_i32(bank),))

    def page_in(self, state: WorkerState, vector: Any, bank: int, adapter: AdapterSpec) -> Call:
        rest = (_i32(bank), self._scale(adapter))
        return Call("page_in", (), self._page_in, (state.bank, vector), rest=rest)

    def to_bank(self, state: WorkerState, one: Any, bank: int, adapter: AdapterSpec) -> Call:
        rest = (_i32(bank), self._scale(adapter))
        return Call("to_bank", (), self._adapters.to_bank, (state.bank, one), rest=rest)

    def gather(self, one: Any) -> Call:
        return Call("gather", (), self._gather, (one,))

    def prefill(self, state: WorkerState, command: commands.Prefill) -> Iterator[Call | None]:
        """Yield the call of each block, or None for one without a token.

        A call takes the cache that the one before has left in ``state``.
        """
        shards = self._shards
        count, length = command.rows.tokens.shape
        name = "prefill with logprobs" if command.logprobs else "prefill"
        shape = (shards * command.block or count, command.piece or length)
        widths = inputs = None
        wishes = command.wishes
        if wishes is not None:
            widths = Widths(wishes.top, wishes.draws)
            inputs = ScoreInputs(wishes.targets, wishes.seeds, wishes.temperatures)
            name, shape = "prefill with scores", (*shape, wishes.top, wishes.targets.shape[2], wishes.draws)
        if command.tables is not None:
            name, shape = f"continued {name}", (*shape, command.tables.shape[1])
        rows = self._rows(command.rows)
        if command.states is not None:
            sources, targets = command.states.sources, command.states.targets
            rows = rows.replace(state_sources=sources, state_targets=targets)
        batch = (rows, command.pages, command.tables, inputs)
        step = self._prefill(command.logprobs, widths)
        for block in blocks(batch, shards, command.block):
            for piece in _pieces(block, shape[1]):
                arrays = (state.base, state.bank, state.cache)
                is_empty = not piece[0].segments.any()
                yield None if is_empty else Call(name, shape, step, arrays, piece, variant=widths)

    def copy_pages(self, state: WorkerState, copies: np.ndarray) -> Call:
        return Call("copy_pages", copies.shape[:1], self._copy_pages, (state.cache,), (copies,))

    def copy_states(self, state: WorkerState, copies: np.ndarray) -> Call:
        return Call("copy_states", copies.shape[:1], self._copy_states, (state.cache,), (copies,))

    def place_tables(self, state: WorkerState, command: commands.Decode) -> Iterator[Call]:
        """Yield the calls that bring the tables up to date; each takes those that the one before has left."""
        rows = state.tables.shape[0] // self._shards
        for source, entries in table_changes(command, self._shards, rows):
            yield Call("place_tables", (), self._place_tables, (state.tables,), (source, entries))

    def decode(self, state: WorkerState, command: commands.Decode) -> Iterator[Call]:
        """Yield the call of each block. It takes what the one before has left in ``state``."""
        active, slots = _active_slots(command, self._setup.bank_slots)
        fields = {name: getattr(command, name) for name in DecodeRows.__dataclass_fields__} | {"slots": slots}
        top, shards = command.top, self._plan.sizes.data_shards
        adapters = self._setup.bank_slots if active is None else active.size
        shape = (shards * command.block or len(slots), adapters, *([top] if top else []))
        step = self._decode(top)
        for number, block in enumerate(blocks(DecodeRows(**fields), shards, command.block)):
            rest = (active, _i32(number * command.block), _i32(command.steps))
            arrays = (state.base, state.bank, state.cache, state.rows, state.next_rows, state.tables)
            yield Call("decode", shape, step, arrays, (block,), rest, variant=top)

    def _batch(self, rows: commands.PackedRows, loss: commands.LossInputs) -> tuple[Rows, TokenLossInputs]:
        inputs = TokenLossInputs(
            kinds=loss.kinds[:, None],
            clip_low=loss.clip_low,
            clip_high=loss.clip_high,
            beta=loss.beta[:, None],
            kl_coeff=loss.kl_coeff[:, None],
            weights=loss.weights,
            advantages=loss.advantages,
            sampling_logprobs=loss.sampling_logprobs,
            ratio_mask=loss.ratio_mask,
        )
        return self._rows(rows), inputs

    def _rows(self, rows: commands.PackedRows) -> Rows:
        experts = rows.experts if self._model.n_experts else None
        if self._model.n_experts and experts is None:
            # Filled in, so that rows with and without routing replay use the same program.
            shape = (*rows.tokens.shape, self._model.n_layers, self._model.experts_per_token)
            experts = np.full(shape, -1, np.int16)
        return Rows(rows.tokens, rows.targets, rows.segments, rows.positions, rows.slots, experts)

    def _ranks(self, adapter: AdapterSpec) -> np.ndarray:
        """Return the ranks of linear maps and of experts."""
        return np.array([adapter.rank, lora.rank_in_experts(self._model, adapter.rank)], np.int32)

    def _scale(self, adapter: AdapterSpec) -> np.ndarray:
        experts = adapter.expert_scale(self._model.expert_rank_divisor)
        return np.array([adapter.scale, experts], np.float32)


def adamw_inputs(command: commands.OptimStep) -> AdamWInputs:
    return AdamWInputs(
        _f32(command.learning_rate),
        _f32(command.beta1),
        _f32(command.beta2),
        _f32(command.eps),
        _f32(command.weight_decay),
        _f32(command.grad_clip_norm),
    )


Prompts = tuple[Rows, np.ndarray, np.ndarray | None, ScoreInputs | None]


def _pieces(batch: Prompts, length: int) -> Iterator[Prompts]:
    """Yield rows of prompts in parts of ``length`` tokens, in order. Each goes on from the one before."""
    rows, pages, tables, inputs = batch
    for start in range(0, pages.shape[1], length):
        if start:
            rows = rows.replace(state_sources=rows.state_targets)
        part = slice(start, start + length)
        by_token = jax.tree.map(lambda x, part=part: x[:, part] if x.ndim > 1 else x, (rows, pages, inputs))
        yield by_token[0], by_token[1], tables, by_token[2]


def _active_slots(command: commands.Decode, bank_slots: int) -> tuple[np.ndarray | None, np.ndarray]:
    """Return the bank slots that live rows use, and every row's index among them; None: the whole bank.

    Their number comes from a short menu, because each number needs its own program.
    """
    is_used = (command.source >= 0) | (command.remaining > 0)
    used = np.unique(command.slots[is_used]) if is_used.any() else np.zeros(1, np.int32)
    sizes = [command.active] if command.active else active_sizes(is_used.size, bank_slots)
    size = next(size for size in sizes if size >= used.size)
    if size == bank_slots:
        return None, np.where(is_used, command.slots, 0).astype(np.int32)
    index = np.searchsorted(used, np.where(is_used, command.slots, used[0]))
    return np.resize(used, size).astype(np.int32), index.astype(np.int32)


def _i32(value: int) -> np.ndarray:
    return np.asarray(value, jnp.int32)


def _f32(value: float) -> np.ndarray:
    return np.asarray(value, jnp.float32)
