"""Chooses among memory plans. Pure arithmetic.

How much is recomputed in the backward pass, how many tokens a micro-batch has and how many rows are decoded
at once come from a short list of choices: those with which an iteration of reinforcement learning should take
the least time (speed.py).

``spmd-tx plan`` and the workers at their start use this same code.
"""

import sys
from collections.abc import Iterator, Mapping

from spmd_tx.worker.memory.plan import Plan, UsableMemory
from spmd_tx.worker.memory.sizes import TRAIN_TOKENS, Sizes
from spmd_tx.worker.memory.speed import cost_of_token
from spmd_tx.worker.memory.steps import LEVELS, StepMemory, StepName


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
            plans += filter(None, planner.plans(rows))
    return min(plans, key=cost_of_token, default=None)  # the first of equals


class Planner:
    """Tries choices, with the base weights split over fsdp or not."""

    def __init__(
        self, sizes: Sizes, memory: UsableMemory, splits_base: bool, corrections: Mapping[StepName, float]
    ) -> None:
        self._sizes, self._memory = sizes, memory
        self.base = sizes.base(splits_base)
        self._arrays = self.base + sizes.adapters + sizes.bank + sizes.of_images
        self._needs: dict[tuple[tuple[str, ...], int], int] = {}
        self.steps = StepMemory(sizes, memory.platform, splits_base, corrections)
        self._left = memory.bytes - self._arrays - self.steps.compiling

    def plans(self, rows: int) -> Iterator[Plan | None]:
        """Yield the plan of each choice with so many rows of decode; None where it does not fit."""
        wish = self._sizes.setup.remat
        levels = LEVELS if wish == "auto" else (wish,)
        most, *fewer = self._sizes.train_tokens(self._memory.platform)
        if not self._sizes.setup.trains:
            yield self._plan((), 0, rows)
            return
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
        fitting = (self._left - states - self.needs(levels, tokens, rows)) // page - 1
        if setup.kv_cache_tokens:
            least = pages = max(-(-setup.kv_cache_tokens // setup.page_size), least)
        else:
            pages = min(fitting, max(self._most_pages(states), least))
        if fitting < least:
            return None
        return Plan(
            steps=self.steps,
            memory=self._memory,
            base=self.base,
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
            left = memory.most_resident - self._arrays - states
            most = min(most, _rounded_down(left // self._sizes.page - 1))
        return most

    def needs(self, levels: tuple[str, ...], tokens: int, rows: int) -> int:
        """Return the steps' bytes, with the first level for usual micro-batches and the last for others."""
        if (levels, tokens) not in self._needs:
            self._needs[levels, tokens] = self._without_decode(levels, tokens)
        sizes = self._sizes
        return max(self._needs[levels, tokens], self.steps.decode(rows, sizes.widest_table, sizes.chunk_part))

    def _without_decode(self, levels: tuple[str, ...], tokens: int) -> int:
        sizes, steps, table = self._sizes, self.steps, self._sizes.widest_table
        prefill = max(
            *(steps.prefill(shape, 0) for shape in sizes.prefill_shapes()),
            *(steps.prefill(shape, table) for shape in sizes.continued_shapes(self._memory.platform)),
        )
        prefill = max(prefill, steps.encode(sizes.most_patches) if sizes.sight else 0)
        if not sizes.setup.trains:
            return prefill
        block = self._memory.block_tokens(tokens)[-1]
        return max(
            prefill,
            steps.train(levels[0], sizes.usual_shape(block)),
            *(steps.train(levels[-1], shape) for shape in sizes.shapes(block)),
        )


def _rounded_down(pages: int) -> int:
    """Keep four binary digits.

    What is free differs a little from start to start, and with another number of pages all programs that use
    them would have to be compiled again.
    """
    unit = 1 << max(0, pages.bit_length() - 4)
    return pages // unit * unit
