"""Explains why nothing fits, with the arithmetic, and which single option would help."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from spmd_tx.byte_sizes import show_size
from spmd_tx.errors import DoesNotFit
from spmd_tx.models.declared.encoding import BASE_DTYPES
from spmd_tx.models.declared.model import Model
from spmd_tx.protocol.commands import PREFILL_TOKENS, SPARE_BANK_SLOTS
from spmd_tx.sharding.mesh import FSDP, TP, abstract_mesh
from spmd_tx.worker.memory.plan import Plan, UsableMemory
from spmd_tx.worker.memory.planner import Planner, best_plan
from spmd_tx.worker.memory.sizes import Sizes
from spmd_tx.worker.memory.steps import LEVELS, StepName

Fit = Callable[[Sizes], Plan | None]

LEAST_CONTEXT = 256  # tokens; shorter ones are not proposed
MOST_OF_AXIS = 64  # devices
AXIS_OPTIONS = {FSDP: "--fully-sharded-data-parallel-size", TP: "--tensor-parallel-size"}


def make_plan(
    sizes: Sizes, memory: UsableMemory, corrections: Mapping[StepName, float] | None = None
) -> Plan:
    """Return the best plan, with the most slots for training that fit. Raises DoesNotFit if nothing fits."""
    for sizes in sizes.slot_choices():  # noqa: B020
        if plan := best_plan(sizes, memory, corrections):
            return plan
    raise refusal(sizes, memory, partial(best_plan, memory=memory, corrections=corrections))


def refusal(sizes: Sizes, memory: UsableMemory, fit: Fit) -> DoesNotFit:
    """Return the error. ``fit`` returns the plan of other sizes with the same memory."""
    splits = sizes.ways_to_split(memory.bytes)[-1]
    planner = Planner(sizes, memory, splits, {})
    level = LEVELS[-1] if sizes.setup.remat == "auto" else sizes.setup.remat
    levels = (level,) if sizes.setup.trains else ()
    tokens, rows = sizes.train_tokens(memory.platform)[-1], sizes.row_counts()[-1]
    steps = f"steps of {PREFILL_TOKENS} tokens"
    if sizes.setup.trains:
        steps = f"steps of {memory.block_tokens(tokens)[-1]} tokens or one row of {sizes.longest_row}"
    wanted = sizes.setup.kv_cache_tokens
    pages = max(sizes.least_pages, -(-wanted // sizes.setup.page_size)) + 1
    copies, slots, compiling = sizes.setup.full_copies, sizes.setup.adapter_slots, planner.steps.compiling
    trained = (
        "weights, gradients and moments in fp32"
        if copies
        else f"{slots} training slot{'s' if slots > 1 else ''} of rank {sizes.setup.max_rank}"
    )
    parts = {
        f"{copies} copies of the weights" if copies else "base weights": planner.base,
        **({trained: sizes.adapters} if sizes.setup.trains else {}),
        **({} if copies else {f"{sizes.setup.bank_slots} sampler slots": sizes.bank}),
        **({"the vision tower and tokens of images": sizes.of_images} if sizes.of_images else {}),
        steps: planner.needs(levels, tokens, rows),
        **({"trying kernels": compiling} if compiling else {}),
        f"a cache of {(pages - 1) * sizes.setup.page_size} tokens": pages * sizes.page,
        **({"states of sequences": sizes.state_slots(rows) * sizes.state} if sizes.state else {}),
    }
    total = sum(parts.values())
    listed = ", ".join(f"{show_size(size)} for {name}" for name, size in parts.items())
    briefly = f"a device has {show_size(memory.bytes)} for it, and at least {show_size(total)} are needed"
    return DoesNotFit(f"this does not fit: {briefly}: {listed}", briefly, total, partial(_help, sizes, fit))


def _help(sizes: Sizes, fit: Fit) -> str:
    """Say what would help, after the arithmetic."""
    if remedies := "; ".join(_remedies(sizes, fit)):
        return f". Each of these alone would make it fit: {remedies}"
    lower = "" if sizes.setup.full_copies else "--max-lora-rank and "
    if sizes.setup.trains and not sizes.setup.full_copies:
        lower = f"--max-lora-adapters, {lower}"
    return (
        ". No single option would make it fit; use more devices, with a larger --tensor-parallel-size, "
        f"and lower {lower}--max-context-length"
    )


def _remedies(sizes: Sizes, fit: Fit) -> Iterator[str]:
    """Yield for each option the first value that fits, by halving."""
    setup = sizes.setup

    def first(option: str, values: Iterable[Any], change: Callable[[Any], dict[str, Any]]) -> Iterator[str]:
        for value in values:
            if fit(replace(sizes, setup=msgspec.structs.replace(setup, **change(value)))):
                yield f"{option} {value}"
                return

    if setup.kv_cache_tokens:
        yield from first("--kv-cache-tokens", [0], lambda value: {"kv_cache_tokens": value})
    if setup.train_tokens and setup.trains:
        yield from first("--train-tokens", [0], lambda value: {"train_tokens": value})
    if sizes.of_images:
        yield from first("--image-tokens", [0], lambda value: {"image_tokens": value})
    if not setup.full_copies:  # weights in fewer bits cannot be trained
        yield from _smaller_weights(sizes, fit)
    if setup.shard_base_weights == "no":
        yield from first("--shard-base-weights", ["auto"], lambda value: {"shard_base_weights": value})
    contexts = _halves(setup.max_context, LEAST_CONTEXT)
    yield from first("--max-context-length", contexts, lambda value: {"max_context": value, "longest_row": 0})
    model = sizes.model
    if setup.full_copies:  # fsdp splits what is trained
        yield from _larger_mesh(sizes, fit, FSDP, lambda size: model.d_model % size == 0)
    else:
        yield from first(
            "--max-lora-adapters", _halves(setup.adapter_slots), lambda value: {"adapter_slots": value}
        )
        yield from first("--max-lora-rank", _halves(setup.max_rank), lambda value: {"max_rank": value})
        yield from first(
            "--sampler-slots",
            _halves(setup.bank_slots - SPARE_BANK_SLOTS),
            lambda value: {"bank_slots": value + SPARE_BANK_SLOTS},
        )
    yield from _larger_mesh(sizes, fit, TP, partial(splits_evenly, model))


def _smaller_weights(sizes: Sizes, fit: Fit) -> Iterator[str]:
    """Yield ways to keep the same weights in fewer bits that fit, the most exact type of the base."""
    model, tp = sizes.model, sizes.mesh.shape[TP]
    packing = replace(model, packs_experts=True)
    if not model.packs_experts and _has_whole_groups(packing, tp) and fit(replace(sizes, model=packing)):
        yield "--expert-weights packed"
    for base_dtype, encoding in BASE_DTYPES.items() if model.base_encoding is None else ():
        smaller = replace(model, base_encoding=encoding)
        if _has_whole_groups(smaller, tp) and fit(replace(sizes, model=smaller)):
            yield f"--base-dtype {base_dtype}"
            break


def _has_whole_groups(model: Model, tp: int) -> bool:
    """Say whether there are matrices that stay encoded, and tp divides no inputs that share a scale."""
    inputs = [
        (each.width_in // (tp if each.split == "rows" else 1), each.kept.group) for each in model.packed
    ]
    return bool(inputs) and not any(width % group for width, group in inputs)


def _larger_mesh(sizes: Sizes, fit: Fit, axis: str, can_be: Callable[[int], bool]) -> Iterator[str]:
    """Yield the first larger size of an axis that fits, so on more devices."""
    shape = dict(sizes.mesh.shape)
    while (size := 2 * shape[axis]) <= MOST_OF_AXIS and can_be(size):
        shape[axis] = size
        setup = msgspec.structs.replace(sizes.setup, **{axis: size})
        if fit(replace(sizes, setup=setup, mesh=abstract_mesh(**shape))):
            yield f"{AXIS_OPTIONS[axis]} {size} ({math.prod(shape.values())} devices)"
            return


def splits_evenly(model: Model, tp: int) -> bool:
    """Whether tp can split the model (coordinator/preflight.py says what is wrong if not)."""
    kv_heads = model.n_kv_heads
    groups = (each.width_in // each.kept.group for each in model.packed if each.split == "rows")
    sizes = (model.n_heads, model.linear_heads, model.vocab_size, *model.inner_widths, *groups)
    return not (any(size % tp for size in sizes) or (kv_heads % tp and tp % kv_heads))


def _halves(value: int, least: int = 1) -> Iterator[int]:
    while (value := value // 2) >= least:
        yield value
