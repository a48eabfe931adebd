"""The memory plan: what a device holds, and how large batches may be. Pure arithmetic.

Permanent arrays come first: base weights, training slots, the sampler bank. The steps need some of the rest
while they run, and the pages of keys and values get what remains. How much is recomputed in the backward
pass, how many tokens a micro-batch has and how many rows are decoded at once come from a short list of
choices: those with which an iteration of reinforcement learning should take the least time (speed.py).

``spmd-tx plan`` and the workers at their start use this same code.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from spmd_tx.protocol.memory_plan import MemoryPlan
from spmd_tx.worker.memory.sizes import TRAIN_TOKENS, USUAL_LENGTH, Sizes
from spmd_tx.worker.memory.speed import cost_of_token
from spmd_tx.worker.memory.steps import LEVELS, LOSS_KINDS, BatchShape, StepMemory, StepName

SMALL_BLOCK = 256  # tokens of a training block, for small requests; on CPUs larger ones are hardly faster
MIDDLE_BLOCK = 2048  # tokens: on accelerators a small block takes as long as its operations take to start


@dataclass(frozen=True)
class UsableMemory:
    """Holds how much of a device may be used."""

    bytes: int
    most_cache_tokens: int | None = None  # per data shard; None: all that fit
    most_resident: int | None = None  # bytes of all permanent arrays, the cache included
    most_saved: int | None = None  # bytes that a training step should keep for its backward pass
    is_host: bool = False  # whether it is host memory, that of CPUs
    tries_kernels: bool = False  # whether compiling needs memory of the device, too: on GPUs

    @property
    def decodes_layers(self) -> bool:
        """Whether packed experts are decoded layer by layer: on TPUs, whose kernel cannot read them."""
        return not (self.is_host or self.tries_kernels)

    def continued_shapes(self, sizes: Sizes) -> list[BatchShape]:
        """Return the largest batches of prompts that continue, with the widest tables."""
        return sizes.continued_shapes(by_rows=self.is_host or sizes.setup.batch_invariant)

    def block_tokens(self, train_tokens: int) -> tuple[int, ...]:
        """Return the tokens of a small block and, on accelerators, of larger ones, for such micro-batches."""
        small = min(SMALL_BLOCK, train_tokens)
        if self.is_host or small == train_tokens:
            return (small,)
        return (
            (small, train_tokens) if train_tokens < 2 * MIDDLE_BLOCK else (small, MIDDLE_BLOCK, train_tokens)
        )


@dataclass(frozen=True)
class Plan:
    """Holds a plan: bytes per device; tokens, rows and pages per data shard."""

    sizes: Sizes
    steps: StepMemory
    memory: UsableMemory
    base: int
    adapters: int
    bank: int
    cache: int
    pages: int  # including page 0, which holds nothing
    state_slots: int  # including slot 0, which holds zeros; 0: the model keeps no states
    train_tokens: int
    decode_rows: int
    levels: tuple[str, ...]  # of recomputation, from usual micro-batches to the largest

    @property
    def splits_base(self) -> bool:
        """Whether fsdp splits the base weights."""
        return self.steps.splits_base

    @property
    def usual_level(self) -> str:
        """The level of recomputation for micro-batches of usual rows."""
        length = min(self.train_tokens, USUAL_LENGTH, self.sizes.longest_row)
        block = self.memory.block_tokens(self.train_tokens)[-1]
        return self.level(max(1, block // length), length)

    @property
    def room(self) -> int:
        """The bytes that steps may use while they run."""
        arrays = self.base + self.adapters + self.bank + self.cache + self.states
        return self.memory.bytes - arrays - self.compiling

    @property
    def states(self) -> int:
        """The bytes of the states of sequences."""
        return self.state_slots * self.sizes.state

    @property
    def compiling(self) -> int:
        """The bytes that compiling may use beside a step."""
        return self.steps.trying_kernels if self.memory.tries_kernels else 0

    @property
    def rows_of_decode(self) -> int:
        """The most rows of a Decode, over all data shards."""
        return self.decode_rows * self.sizes.data_shards

    @property
    def cache_tokens(self) -> int:
        return (self.pages - 1) * self.sizes.setup.page_size

    @property
    def train_shapes(self) -> list[BatchShape]:
        """The largest block of each row length."""
        return self.sizes.shapes(self.memory.block_tokens(self.train_tokens)[-1])

    def level(self, rows: int, length: int) -> str:
        """Return the level of recomputation for a micro-batch, the least that fits."""
        shape = BatchShape(rows, length)
        return next((level for level in self.levels if self._allows(level, shape)), self.levels[-1])

    def _allows(self, level: str, shape: BatchShape) -> bool:
        most = self.memory.most_saved
        if most is not None and self.steps.saved(level, shape) > most:
            return False
        return self.steps.train(level, shape) <= self.room

    def worst(self) -> dict[StepName, tuple[BatchShape, int]]:
        """Return for each step its largest batch and the bytes that it needs."""
        largest_of: dict[StepName, tuple[BatchShape, int]] = {}
        for shape in self.train_shapes:
            level = self.level(*shape)
            _keep_largest(largest_of, f"train {level}", shape, self.steps.train_with("", level, shape))
        largest = max(largest_of, key=lambda step: largest_of[step][1])
        shape = largest_of[largest][0]
        for kind in LOSS_KINDS[1:]:
            largest_of[largest + kind] = (shape, self.steps.train_with(kind, self.level(*shape), shape))
        for shape in self.memory.continued_shapes(self.sizes):
            size = self.steps.prefill(shape, self.sizes.widest_table)
            _keep_largest(largest_of, "continued prefill", shape, size)
        for shape in self.sizes.prefill_shapes():
            _keep_largest(largest_of, "prefill", shape, self.steps.prefill(shape, 0))
        rows = BatchShape(self.decode_rows, self.sizes.widest_table)
        largest_of["decode"] = (rows, self.steps.decode(*rows))
        return largest_of


def _keep_largest(
    largest_of: dict[StepName, tuple[BatchShape, int]], step: StepName, shape: BatchShape, size: int
) -> None:
    if step not in largest_of or largest_of[step][1] < size:
        largest_of[step] = (shape, size)


def best_plan(
    sizes: Sizes, memory: UsableMemory, corrections: Mapping[StepName, float] | None = None
) -> Plan | None:
    """Return the plan that is predicted to be the fastest, or None if none fits.

    ``corrections`` are those of StepMemory.
    """
    plans: list[Plan] = []
    for splits in sizes.ways_to_split(memory.bytes):
        planner = Planner(sizes, memory, splits, corrections or {})
        for rows in sizes.row_counts():
            plans += planner.plans(rows)
    return min(plans, key=cost_of_token, default=None)  # the first of equals


class Planner:
    """Tries choices, with the base weights split over fsdp or not."""

    def __init__(
        self, sizes: Sizes, memory: UsableMemory, splits_base: bool, corrections: Mapping[StepName, float]
    ) -> None:
        self._sizes, self._memory = sizes, memory
        self.base, self.adapters, self.bank = sizes.base(splits_base), sizes.adapters, sizes.bank
        self._needs: dict[tuple[tuple[str, ...], int], int] = {}
        self.steps = StepMemory(
            model=sizes.model,
            mesh=sizes.mesh,
            itemsize=jnp.dtype(sizes.dtype).itemsize,
            adapter_slots=sizes.setup.adapter_slots,
            max_rank=sizes.setup.max_rank,
            bank_bytes=self.bank,
            gradient_bytes=sizes.gradient,
            splits_base=splits_base,
            decodes_layers=memory.decodes_layers,
            attention=sizes.setup.kernels.rows,
            corrections=corrections,
        )
        self.compiling = self.steps.trying_kernels if memory.tries_kernels else 0
        self.left = memory.bytes - self.base - self.adapters - self.bank - self.compiling

    def plans(self, rows: int) -> list[Plan]:
        """Return the plans that fit with so many rows of decode."""
        return [plan for plan in self._choices(rows) if plan is not None]

    def _choices(self, rows: int) -> Iterator[Plan | None]:
        """Yield plans for each choice; None where one does not fit."""
        wish = self._sizes.setup.remat
        levels = LEVELS if wish == "auto" else (wish,)
        memory = self._memory
        most, *fewer = self._sizes.train_tokens(on_cpu=memory.is_host, on_gpu=memory.tries_kernels)
        for tokens in (most, *(each for each in fewer if each >= TRAIN_TOKENS[0])):
            for start in range(len(levels)):
                yield self._plan(levels[start:], tokens, rows)
        for tokens in fewer:
            yield self._plan(levels[-1:], tokens, rows)

    def _plan(self, levels: tuple[str, ...], tokens: int, rows: int) -> Plan | None:
        """Return a plan, or None if the cache would be too small."""
        sizes, setup = self._sizes, self._sizes.setup
        page, least = sizes.page, sizes.least_pages
        state_slots = sizes.state_slots(rows)
        states = state_slots * sizes.state
        fitting = (self.left - states - self.needs(levels, tokens, rows)) // page - 1
        if setup.kv_cache_tokens:
            least = pages = max(-(-setup.kv_cache_tokens // setup.page_size), least)
        else:
            pages = min(fitting, max(self._most_pages(states), least))
        if fitting < least:
            return None
        return Plan(
            sizes=sizes,
            steps=self.steps,
            memory=self._memory,
            base=self.base,
            adapters=self.adapters,
            bank=self.bank,
            cache=(pages + 1) * page,
            pages=pages + 1,
            state_slots=state_slots,
            train_tokens=tokens,
            decode_rows=rows,
            levels=levels,
        )

    def _most_pages(self, states: int) -> int:
        """Return the most pages that the memory's limits allow."""
        memory, most = self._memory, sys.maxsize
        if memory.most_cache_tokens is not None:
            most = memory.most_cache_tokens // self._sizes.setup.page_size
        if memory.most_resident is not None:
            arrays = self.base + self.adapters + self.bank + states
            most = min(most, _rounded_down((memory.most_resident - arrays) // self._sizes.page - 1))
        return most

    def needs(self, levels: tuple[str, ...], tokens: int, rows: int) -> int:
        """Return the steps' bytes, with the first level for usual micro-batches and the last for others."""
        if (levels, tokens) not in self._needs:
            self._needs[levels, tokens] = self._without_decode(levels, tokens)
        return max(self._needs[levels, tokens], self.steps.decode(rows, self._sizes.widest_table))

    def _without_decode(self, levels: tuple[str, ...], tokens: int) -> int:
        sizes, steps = self._sizes, self.steps
        block = self._memory.block_tokens(tokens)[-1]
        usual = min(block, USUAL_LENGTH, sizes.longest_row)
        return max(
            steps.train(levels[0], BatchShape(max(1, block // usual), usual)),
            *(steps.train(levels[-1], shape) for shape in sizes.shapes(block)),
            *(steps.prefill(shape, 0) for shape in sizes.prefill_shapes()),
            *(steps.prefill(shape, sizes.widest_table) for shape in self._memory.continued_shapes(sizes)),
        )


def _rounded_down(pages: int) -> int:
    """Keep four binary digits.

    What is free differs a little from start to start, and with another number of pages all programs that use
    them would have to be compiled again.
    """
    unit = 1 << max(0, pages.bit_length() - 4)
    return pages // unit * unit


def report(plan: Plan) -> MemoryPlan:
    """Summarize the plan for the coordinator and for people."""
    shapes, needs = plan.train_shapes, plan.worst().items()
    return MemoryPlan(
        pages=plan.pages,
        page_size=plan.sizes.setup.page_size,
        train_tokens=plan.train_tokens,
        block_tokens=plan.memory.block_tokens(plan.train_tokens),
        decode_rows=plan.decode_rows,
        device_bytes=plan.memory.bytes,
        base_bytes=plan.base,
        adapter_bytes=plan.adapters,
        bank_bytes=plan.bank,
        cache_bytes=plan.cache,
        state_slots=plan.state_slots,
        state_bytes=plan.states,
        compiling_bytes=plan.compiling,
        step_bytes=plan.room,
        step_needs={f"{step} {rows} x {length}": size for step, ((rows, length), size) in needs},
        remat={f"{rows} x {length}": plan.level(rows, length) for rows, length in shapes},
        splits_base=plan.splits_base,
        on_cpu=plan.memory.is_host,
    )
