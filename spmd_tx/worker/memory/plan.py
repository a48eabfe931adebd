"""The memory plan: what a device holds, and how large batches may be. Pure arithmetic.

Permanent arrays come first: base weights, training slots, the sampler bank. The steps need some of the rest
while they run, and the pages of keys and values get what remains. planner.py chooses among plans.
"""

from dataclasses import dataclass
from operator import itemgetter

from spmd_tx.protocol.commands import MAX_TARGETS, active_sizes
from spmd_tx.protocol.kernels import Platform
from spmd_tx.protocol.memory_plan import MemoryPlan
from spmd_tx.protocol.programs import ProgramShape
from spmd_tx.protocol.setup import Setup
from spmd_tx.worker.memory.sizes import BatchShape, Sizes, bytes_per_device
from spmd_tx.worker.memory.steps import LOSS_KINDS, OF_SEQUENCES, OF_SEVERAL_TARGETS, StepMemory, StepName

SMALL_BLOCK = 256  # tokens of a training block, for small requests; on CPUs larger ones are hardly faster
# That a device computes while it reads one byte: 295 on H100, 240 on TPU v5e. On CPUs a row of a decode takes
# 0.3 of a step without rows.
FLOPS_PER_BYTE, CPU_FLOPS_PER_BYTE = 300, 2
MIDDLE_BLOCK = 2048  # tokens: on accelerators a small block takes as long as its operations take to start


@dataclass(frozen=True)
class UsableMemory:
    """Holds how much of a device may be used."""

    bytes: int
    platform: Platform  # of "cpu" it is host memory
    most_cache_tokens: int | None = None  # per data shard; None: all that fit
    most_resident: int | None = None  # bytes of all permanent arrays, the cache included
    most_saved: int | None = None  # bytes that a training step should keep for its backward pass

    def block_tokens(self, train_tokens: int) -> tuple[int, ...]:
        """Return the tokens of a small block and, on accelerators, of larger ones, for such micro-batches."""
        small = min(SMALL_BLOCK, train_tokens)
        if self.platform == "cpu" or small == train_tokens:
            return (small,)
        return (
            (small, train_tokens) if train_tokens < 2 * MIDDLE_BLOCK else (small, MIDDLE_BLOCK, train_tokens)
        )


@dataclass(frozen=True)
class Plan:
    """Holds a plan: bytes per device; tokens, rows and pages per data shard."""

    steps: StepMemory
    memory: UsableMemory
    base: int
    pages: int  # including page 0, which holds nothing
    state_slots: int  # including slot 0, which holds zeros; 0: the model keeps no states
    train_tokens: int  # 0: nothing is trained
    decode_rows: int
    levels: tuple[str, ...]  # of recomputation, from usual micro-batches to the largest

    @property
    def sizes(self) -> Sizes:
        return self.steps.sizes

    @property
    def splits_base(self) -> bool:
        """Whether fsdp splits the base weights."""
        return self.steps.splits_base

    @property
    def usual_level(self) -> str:
        """The level of recomputation for micro-batches of usual rows."""
        return self.level(*self.usual_shape)

    @property
    def usual_shape(self) -> BatchShape:
        """The largest block of usual rows."""
        return self.sizes.usual_shape(self.memory.block_tokens(self.train_tokens)[-1])

    @property
    def room(self) -> int:
        """The bytes that steps may use while they run."""
        arrays = self.base + self.sizes.adapters + self.sizes.bank + self.cache + self.states
        return self.memory.bytes - self.sizes.of_images - arrays - self.steps.compiling

    @property
    def cache(self) -> int:
        """The bytes of the pages of keys and values."""
        return self.pages * self.sizes.page

    @property
    def states(self) -> int:
        """The bytes of the states of sequences."""
        return self.state_slots * self.sizes.state

    @property
    def rows_of_decode(self) -> int:
        """The most rows of a Decode, over all data shards."""
        return self.decode_rows * self.sizes.data_shards

    @property
    def ridge_tokens(self) -> float:
        """The tokens that a device multiplies with the weights that they meet while it reads all of them."""
        on_cpu = self.memory.platform == "cpu"
        flops = (CPU_FLOPS_PER_BYTE if on_cpu else FLOPS_PER_BYTE) * self.sizes.whole_base
        return flops / (2 * self.sizes.numbers_met)

    @property
    def cache_tokens(self) -> int:
        return (self.pages - 1) * self.sizes.setup.page_size

    @property
    def train_shapes(self) -> list[BatchShape]:
        """The largest block of training of each row length."""
        return (
            []
            if not self.train_tokens
            else self.sizes.shapes(self.memory.block_tokens(self.train_tokens)[-1])
        )

    def level(self, rows: int, length: int) -> str:
        """Return the level of recomputation for a micro-batch, the least that fits."""
        shape = BatchShape(rows, length)
        return next((level for level in self.levels if self._allows(level, shape)), self.levels[-1])

    def _allows(self, level: str, shape: BatchShape) -> bool:
        most = self.memory.most_saved
        if most is not None and self.steps.saved(level, shape) > most:
            return False
        return self.steps.train(level, shape) <= self.room

    def program(self, step: StepName, shape: BatchShape) -> ProgramShape:
        """Return the program of a step for a shape of each data shard, the largest of those that it has."""
        setup, rows = self.sizes.setup, shape.rows * self.sizes.data_shards
        if step == "decode":
            return ProgramShape(step="decode", rows=rows, active=_most_copied(setup))
        if step == "encode":
            return ProgramShape(step="encode_images", patches=shape.length)
        if step.endswith("prefill"):
            table = self.sizes.widest_table // setup.page_size if step.startswith("continued") else 0
            return ProgramShape(
                step="prefill", rows=rows, row_length=shape.length, logprobs=True, table=table
            )
        return ProgramShape(
            step="forward_backward",
            rows=rows,
            row_length=shape.length,
            targets=MAX_TARGETS if step.endswith(OF_SEVERAL_TARGETS) else 0,
            sequences=step.endswith(OF_SEQUENCES),
        )

    def worst(self) -> dict[StepName, tuple[BatchShape, int]]:
        """Return for each step its largest batch and the bytes that it needs."""
        steps, sizes, widest = self.steps, self.sizes, self.sizes.widest_table
        needs: list[tuple[StepName, BatchShape, int]] = []
        for shape in self.train_shapes:
            level = self.level(*shape)
            needs.append((f"train {level}", shape, steps.train_with("", level, shape)))
        if needs:
            step, shape, _ = max(needs, key=itemgetter(2))
            level = self.level(*shape)
            needs += [(step + kind, shape, steps.train_with(kind, level, shape)) for kind in LOSS_KINDS[1:]]
        continued = sizes.continued_shapes(self.memory.platform)
        needs += [("continued prefill", shape, steps.prefill(shape, widest)) for shape in continued]
        needs += [("prefill", shape, steps.prefill(shape, 0)) for shape in sizes.prefill_shapes()]
        if sizes.sight is not None:
            image = BatchShape(1, sizes.most_patches)
            needs.append(("encode", image, steps.encode(image.length)))
        rows = BatchShape(self.decode_rows, widest)
        needs.append(("decode", rows, steps.decode(*rows)))
        largest: dict[StepName, tuple[BatchShape, int]] = {}
        for step, shape, size in needs:
            largest[step] = max(largest.get(step, (shape, -1)), (shape, size), key=itemgetter(1))
        return largest


def _most_copied(setup: Setup) -> int:
    """Return for how many adapters the Decode is that copies most: one for all reads them where they are."""
    if setup.batch_invariant:
        return setup.bank_slots
    sizes = active_sizes(setup.bank_slots + 1, setup.bank_slots)
    return max((size for size in sizes if size < setup.bank_slots), default=1)


def report(plan: Plan) -> MemoryPlan:
    """Summarize the plan for the coordinator and for people."""
    shapes, needs, sight = plan.train_shapes, plan.worst().items(), plan.sizes.sight
    return MemoryPlan(
        pages=plan.pages,
        page_size=plan.sizes.setup.page_size,
        train_tokens=plan.train_tokens,
        block_tokens=plan.memory.block_tokens(plan.train_tokens) if plan.train_tokens else (),
        decode_rows=plan.decode_rows,
        device_bytes=plan.memory.bytes,
        base_bytes=plan.base,
        adapter_slots=plan.sizes.setup.adapter_slots,
        adapter_bytes=plan.sizes.adapters,
        bank_bytes=plan.sizes.bank,
        cache_bytes=plan.cache,
        state_slots=plan.state_slots,
        state_bytes=plan.states,
        tower_bytes=bytes_per_device(plan.sizes.mesh, sight.tower) if sight else 0,
        image_tokens=plan.sizes.image_tokens,
        image_bytes=bytes_per_device(plan.sizes.mesh, sight.pool) if sight else 0,
        compiling_bytes=plan.steps.compiling,
        step_bytes=plan.room,
        step_needs={f"{step} {rows} x {length}": size for step, ((rows, length), size) in needs},
        remat={f"{rows} x {length}": plan.level(rows, length) for rows, length in shapes},
        splits_base=plan.splits_base,
        on_cpu=plan.memory.platform == "cpu",
        draft_cost=plan.sizes.draft_cost,
        ridge_tokens=plan.ridge_tokens,
    )
