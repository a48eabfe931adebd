"""What ``spmd-tx plan`` says beside the table: how fast at most, what the context costs, what to run."""

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from spmd_tx.byte_sizes import show_size
from spmd_tx.config import ServerConfig, as_words
from spmd_tx.errors import StartError
from spmd_tx.models.declared.model import Model
from spmd_tx.protocol.memory_plan import MemoryPlan
from spmd_tx.worker.memory.accelerators import Devices

TYPICAL_TOKENS = 2048  # of a sequence, where its length decides
SHORTEST_CONTEXT = 4096  # tokens, that anybody is advised to choose
WORTH = 1.1  # times the tokens of cache


@dataclass(frozen=True)
class Planned:
    """What ``spmd-tx plan`` prints."""

    config: ServerConfig
    model: Model
    devices: Devices
    plan: MemoryPlan
    why: str = ""  # this mesh was chosen; empty: it was given


def hints(planned: Planned, replan: Callable[[ServerConfig], MemoryPlan]) -> Iterator[str]:
    """Yield the lines below the table. ``replan`` plans for another configuration of the same model."""
    yield from _speeds(planned)
    yield from _context(planned, replan)
    yield f"to serve it: spmd-tx serve {shlex.join(as_words(planned.config, 'plan'))}"


def _speeds(planned: Planned) -> Iterator[str]:
    """How fast the devices' arithmetic and memory let it be; nothing where their speed is not known."""
    config, plan, known = planned.config, planned.plan, planned.devices.accelerator
    if known is None or not known.flops or config.mesh is None:
        return
    fsdp, ep, _ = config.mesh
    products = 6 if config.full_parameters else 4  # forward and back; frozen weights need no gradient
    training = planned.devices.count * known.flops / (products * planned.model.numbers_met())
    gathered = plan.base_bytes * (fsdp - 1) / known.links if plan.splits_base else 0.0
    weights = plan.base_bytes / known.bandwidth + gathered  # seconds to read them once
    cache = plan.cache_bytes / max(plan.cache_tokens, 1) / known.bandwidth  # seconds per token that a row has
    rows = min(plan.decode_rows, max(1, plan.cache_tokens // TYPICAL_TOKENS))
    many = fsdp * ep * rows / (weights + rows * TYPICAL_TOKENS * cache)
    one = 1 / (weights + TYPICAL_TOKENS * cache)
    parts = [f"training {training:,.0f} tokens/s"] if plan.train_tokens else []
    parts += [f"sampling {many:,.0f} tokens/s in {fsdp * ep * rows:,} sequences", f"{one:,.0f} in one"]
    yield (
        f"at most, by arithmetic and memory alone: {', '.join(parts)}, each of {TYPICAL_TOKENS} tokens; "
        "--compile predicts what can be reached"
    )


def _context(planned: Planned, replan: Callable[[ServerConfig], MemoryPlan]) -> Iterator[str]:
    """What half of the context would leave, where that is more."""
    config, plan = planned.config, planned.plan
    context = config.max_context_length or planned.model.max_positions
    half = context // 2
    if half < SHORTEST_CONTEXT:
        return
    try:
        shorter = replan(msgspec.structs.replace(config, max_context_length=half))
    except StartError:
        return
    if shorter.cache_tokens > WORTH * plan.cache_tokens:
        yield (
            f"a context of {context} tokens takes {show_size(plan.step_bytes)} for steps; "
            f"--max-context-length {half} would take {show_size(shorter.step_bytes)}, "
            f"and keep {shorter.cache_tokens} tokens"
        )
