"""Compiles the largest batch of each step before anything is allocated, and reads its memory from XLA."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_tx.models.adapters.lora import adapter_weights
from spmd_tx.models.base_weights import weights
from spmd_tx.models.linear_attention.state_pool import cache_and_states
from spmd_tx.protocol.commands import MAX_TARGETS, STOP_TOKENS, active_sizes
from spmd_tx.sharding.mesh import DATA
from spmd_tx.sharding.weight import Weight, abstract
from spmd_tx.worker.memory.plan import Plan, UsableMemory
from spmd_tx.worker.memory.refusal import make_plan
from spmd_tx.worker.memory.sizes import Sizes
from spmd_tx.worker.memory.steps import BatchShape, StepName
from spmd_tx.worker.steps.full import full_state, make_full_forward_backward
from spmd_tx.worker.steps.losses import TokenLossInputs
from spmd_tx.worker.steps.sample import Bank, DecodeRows, RowState, make_decode, make_prefill
from spmd_tx.worker.steps.train import Rows, make_forward_backward
from spmd_tx.worker.steps.train_state import train_weights

Measure = Callable[[Plan, StepName, BatchShape], int]


def measured_plan(
    sizes: Sizes,
    memory: UsableMemory,
    progress: Callable[[str], None],
    agreed: Callable[[float], float],
    measure: Measure,
) -> Plan:
    """Make a plan with measured steps; each kind of step is measured once.

    ``agreed`` turns the numbers that the processes have measured into one.
    """
    corrections: dict[StepName, float] = {}
    while True:
        plan = make_plan(sizes, memory, corrections)
        unknown = {step: worst for step, worst in plan.worst().items() if step not in corrections}
        if not unknown:
            return plan
        for step, (shape, estimate) in unknown.items():
            progress(f"measuring {step} of {shape.rows} x {shape.length}")
            corrections[step] = agreed(measure(plan, step, shape) / estimate)


def measure(plan: Plan, step: StepName, shape: BatchShape) -> int:
    """Return the bytes of a device that the step needs for this shape, besides its arguments.

    ``shape`` is per data shard; for decode its length is what a row's pages hold, in tokens.
    """
    programs = _Programs(plan)
    if step == "prefill":
        lowered = programs.prefill(shape)
    elif step == "continued prefill":
        lowered = programs.prefill(shape, plan.sizes.widest_table)
    elif step == "decode":
        lowered = programs.decode(shape)
    else:
        level, *kind = step.removeprefix("train ").split(" ", 1)
        lowered = programs.train(level, shape, *kind)
    return lowered.compile().memory_analysis().temp_size_in_bytes


class _Programs:
    """Lowers the steps of a plan for abstract arguments."""

    def __init__(self, plan: Plan) -> None:
        sizes, setup = plan.sizes, plan.sizes.setup
        assert isinstance(sizes.mesh, Mesh)
        self._model, self._mesh, self._setup = sizes.model, sizes.mesh, setup
        self._base = weights(sizes.model, sizes.mesh, sizes.dtype, split_over_fsdp=plan.splits_base)
        self._train = (
            full_state(sizes.model, sizes.mesh)
            if setup.full_copies
            else train_weights(sizes.model, sizes.mesh, setup.adapter_slots, setup.max_rank)
        )
        bank = adapter_weights(
            sizes.model, sizes.mesh, setup.bank_slots, setup.max_rank, sizes.dtype, zero=False
        )
        self._bank = Bank(bank, Weight((setup.bank_slots, 2), P(), jnp.float32))
        self._cache = cache_and_states(
            sizes.model, sizes.mesh, plan.pages, setup.page_size, plan.state_slots, sizes.dtype
        )
        self._shards = setup.fsdp * setup.ep

    def train(self, level: str, shape: BatchShape, kind: str = "") -> Any:
        """``kind`` is "", "of sequences" or "of several targets", as in LOSS_KINDS."""
        is_full = bool(self._setup.full_copies)
        make: Any = make_full_forward_backward if is_full else make_forward_backward
        step = make(self._model, self._mesh, self._base, self._train, level, kernels=self._setup.kernels)
        state = self._place(self._train)
        arrays = [state.w, state.grad_sum]
        arrays = arrays if is_full else [self._place(self._base), *arrays, state.scale]
        loss = TokenLossInputs(
            kinds=self._rows(shape.rows, 1),
            beta=self._rows(shape.rows, 1, dtype=jnp.float32),
            kl_coeff=self._rows(shape.rows, 1, dtype=jnp.float32),
            ratio_mask=self._rows(*shape, dtype=jnp.float32) if kind == "of sequences" else None,
            **{
                name: self._rows(*shape, dtype=jnp.float32)
                for name in ("clip_low", "clip_high", "weights", "advantages", "sampling_logprobs")
            },
        )
        rows = self._packed(shape)
        if kind == "of several targets":
            rows = rows.replace(targets=self._rows(*shape, MAX_TARGETS))
            loss = loss.replace(weights=self._rows(*shape, MAX_TARGETS, dtype=jnp.float32))
        return step.lower(*arrays, rows, loss)

    def prefill(self, shape: BatchShape, table_tokens: int = 0) -> Any:
        """``table_tokens`` as in StepMemory.prefill."""
        pages = table_tokens // self._setup.page_size
        tables = self._rows(shape.rows, pages) if pages else None
        arrays = (self._base, self._bank, self._cache)
        step: Any = make_prefill(
            self._model,
            self._mesh,
            *arrays,
            logprobs=True,
            kernels=self._setup.kernels,
        )
        slots = self._states(shape.rows)
        rows = self._packed(shape).replace(state_sources=slots, state_targets=slots)
        return step.lower(*self._sampling(), rows, self._rows(*shape), tables, None)

    def decode(self, shape: BatchShape) -> Any:
        setup, rows = self._setup, shape.rows
        step: Any = make_decode(
            self._model,
            self._mesh,
            self._base,
            self._bank,
            self._cache,
            setup.decode_steps,
            kernels=setup.kernels,
            batch_invariant=setup.batch_invariant,
        )
        numbers: dict[str, Any] = {name: self._rows(rows) for name in DecodeRows.__dataclass_fields__}
        numbers |= {name: self._rows(rows, dtype=jnp.float32) for name in ("temperatures", "top_p")}
        numbers |= {
            "seeds": self._rows(rows, 2, dtype=jnp.uint32),
            "stop_tokens": self._rows(rows, STOP_TOKENS),
            "forced": self._rows(rows, setup.decode_steps) if setup.batch_invariant else None,
            "states": self._states(rows),
        }
        state = RowState(*(self._rows(rows) for _ in range(3)))
        # The program that copies most: one for the whole bank reads adapters where they are.
        sizes = active_sizes(setup.bank_slots + 1, setup.bank_slots)
        copied = max((size for size in sizes if size < setup.bank_slots), default=1)
        active = None if setup.batch_invariant else jax.ShapeDtypeStruct((copied,), jnp.int32)
        steps = jax.ShapeDtypeStruct((), jnp.int32)
        tables = self._rows(rows, shape.length // setup.page_size)
        return step.lower(
            *self._sampling(), state, state, tables, DecodeRows(**numbers), active, steps, steps
        )

    def _sampling(self) -> tuple[Any, Any, Any]:
        return self._place(self._base), self._place(self._bank), self._place(self._cache)

    def _packed(self, shape: BatchShape) -> Rows:
        whole, experts = self._rows(*shape), None
        if self._model.n_experts:
            chosen = (self._model.n_layers, self._model.experts_per_token)
            experts = self._rows(*shape, *chosen, dtype=jnp.int16)
        return Rows(whole, whole, whole, whole, self._rows(shape.rows), experts)

    def _states(self, rows: int) -> jax.ShapeDtypeStruct | None:
        """Return the slots of rows, if the model keeps states."""
        return self._rows(rows) if self._model.stateful is not None else None

    def _place(self, declared: Any) -> Any:
        return abstract(self._mesh, declared)

    def _rows(self, count: int, *rest: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        """Return an abstract array of ``count`` rows per data shard."""
        sharding = NamedSharding(self._mesh, P(DATA))
        return jax.ShapeDtypeStruct((self._shards * count, *rest), dtype, sharding=sharding)
