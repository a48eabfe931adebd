"""Drives the tiny model's sampling steps as the coordinator does: pages, tables, rows, dispatches."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_tx.models.adapters.lora import adapter_weights
from spmd_tx.models.attention.kv_cache import cache_weights
from spmd_tx.models.declared.model import Model
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.mesh import DATA
from spmd_tx.sharding.transfer import rows_to_devices, to_devices
from spmd_tx.sharding.weight import Weight, shardings
from spmd_tx.worker.steps.decode_rows import DecodeRows, RowState
from spmd_tx.worker.steps.pages import make_copy_pages
from spmd_tx.worker.steps.prompt_scores import ScoreInputs, Widths
from spmd_tx.worker.steps.sample import Bank, make_decode, make_prefill
from spmd_tx.worker.steps.train import Rows
from tests.support.tiny_engine import (
    BOTH_SCALES,
    LENGTH,
    MODEL,
    RANK,
    SLOTS,
    TinyEngine,
    is_compiled_quickly,
    random_adapters,
    tiny_engine,
    to_numpy,
)

PAGE_SIZE, PAGES = 8, 40
MOST_ROWS, MOST_STEPS = 16, 8  # of one data shard; of one dispatch
PREFILL_ROWS = 4  # of one data shard
COPIES = 2  # of one data shard
BANK_SLOTS = SLOTS


def sampler_weights(model: Model = MODEL) -> Any:
    """Return the random adapters, with the base model in slot 0."""
    w = random_adapters(1, model)
    for leaf in jax.tree.leaves(w):
        leaf[..., 0, :, :] = 0
    return w


@dataclass(frozen=True, eq=False)
class Sample:
    """Describes one sequence to sample."""

    prompt: np.ndarray
    slot: int = 0
    seed: tuple[int, int] = (0, 0)
    temperature: float = 1.0
    top_k: int = MODEL.vocab_size
    top_p: float = 1.0
    stops: tuple[int, ...] = ()
    max_tokens: int = 2 * MOST_STEPS

    def pages(self, first: int) -> np.ndarray:
        """Return enough consecutive pages, from ``first``."""
        longest = len(self.prompt) + self.max_tokens + MOST_STEPS
        return np.arange(first, first - (-longest // PAGE_SIZE), dtype=np.int32)


def random_prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, MODEL.vocab_size, length, dtype=np.int32)


@dataclass(frozen=True)
class Place:
    """Holds a sample's row in a Decode, and in the one before (-1: it starts here)."""

    sample: Sample
    pages: np.ndarray
    row: int  # within the data shard
    shard: int = 0
    source: int = -1


@dataclass(frozen=True)
class Drawn:
    tokens: np.ndarray
    logprobs: np.ndarray
    experts: np.ndarray  # [K, L, k] that the inputs of the steps went through; empty without experts
    top_tokens: np.ndarray  # [K, top]
    top_logprobs: np.ndarray

    def __add__(self, other: "Drawn") -> "Drawn":
        pairs = zip(self.parts, other.parts, strict=True)
        return Drawn(*(np.concatenate(pair) for pair in pairs))

    @property
    def parts(self) -> tuple[np.ndarray, ...]:
        return tuple(vars(self).values())

    def living(self) -> "Drawn":
        """Return the tokens without the replies of a dead row."""
        return Drawn(*(part[self.tokens >= 0] for part in self.parts))


class TinySampler:
    """Holds the steps with their cache and rows on one mesh."""

    def __init__(self, engine: TinyEngine, dtype: Any, kernels: Kernels = Kernels()) -> None:
        self.engine, self.mesh, self.data_shards = engine, engine.mesh, engine.data_shards
        model = engine.model
        bank = adapter_weights(model, self.mesh, BANK_SLOTS, RANK, dtype, zero=False)
        self._bank = Bank(bank, Weight((BANK_SLOTS, 2), jax.P(), jnp.float32))
        self._cache = cache_weights(model, self.mesh, PAGES, PAGE_SIZE, dtype)
        row = Weight((MOST_ROWS * self.data_shards,), jax.P(DATA), jnp.int32)
        self._rows = RowState(row, row, row)
        declared = (model, self.mesh, engine.declared_base, self._bank, self._cache)
        self._prefill = make_prefill(*declared, logprobs=True, kernels=kernels)
        self._copy_pages = make_copy_pages(self.mesh, self._cache)
        self._scored_prefill = functools.cache(
            lambda widths: make_prefill(*declared, logprobs=True, widths=widths, kernels=kernels)
        )
        self._decode = functools.cache(lambda top: make_decode(*declared, MOST_STEPS, top, kernels=kernels))
        self.reset()

    def reset(self, stale: float = 0.0, w: Any = None) -> "TinySampler":
        """Fill pages with ``stale``, drop all rows, and put the given adapters into the bank."""
        w = sampler_weights(self.engine.model) if w is None else w
        cast = jax.tree.map(lambda leaf, weight: leaf.astype(weight.dtype), w, self._bank.w)
        self.bank = self._place(Bank(cast, BOTH_SCALES), self._bank)
        self.cache = self._filled(self._cache, stale)
        self.rows, self.next_rows = (self._filled(self._rows, 0) for _ in range(2))
        return self

    def prefill(
        self, places: Sequence[Place], copies: Sequence[tuple[int, int, int]] = ()
    ) -> list[np.ndarray]:
        """Return the log-probabilities of each prompt; a copy is (data shard, from page, to page)."""
        return [logprobs for logprobs, _ in self.prefill_all(places, copies)]

    def prefill_all(
        self, places: Sequence[Place], copies: Sequence[tuple[int, int, int]] = (), first: int = 0
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """The same, and the experts [T, L, k] that the tokens went through; of those from ``first`` on."""
        batch, shape = self._prompts(places, first), self.prefill_shape
        batch = (*batch, self.tables(places) if first else None, None)
        self.cache, scores, experts = self._prefill(self.engine.base, self.bank, self.cache, *batch)
        self.cache = self._copy_pages(self.cache, self._copies(copies))
        logprobs = np.asarray(scores["logprobs"])
        experts = np.zeros(shape) if experts is None else np.asarray(experts)
        return [(logprobs[place], experts[place]) for place in self.prefill_places(places, first)]

    def tables(self, places: Sequence[Place]) -> Any:
        """Return the pages of each prompt."""
        tables = np.zeros((self.prefill_shape[0], 8), np.int32)
        for place, (row, _) in zip(places, self.prefill_places(places), strict=True):
            tables[row, : len(place.pages)] = place.pages[:8]
        return rows_to_devices(self.mesh, tables)

    def scored_prefill(
        self, places: Sequence[Place], widths: Widths, inputs: ScoreInputs
    ) -> list[dict[str, np.ndarray]]:
        """Return all scores of each prompt; the inputs are [prefill_shape, ...]."""
        batch = (*self._prompts(places), None, rows_to_devices(self.mesh, inputs))
        prefill = self._scored_prefill(widths)
        self.cache, scores, _ = prefill(self.engine.base, self.bank, self.cache, *batch)
        scores = to_numpy(scores)
        return [
            {name: array[place] for name, array in scores.items()} for place in self.prefill_places(places)
        ]

    @property
    def prefill_shape(self) -> tuple[int, int]:
        return PREFILL_ROWS * self.data_shards, LENGTH

    def prefill_places(self, places: Sequence[Place], first: int = 0) -> list[tuple[int, slice]]:
        """Return row and columns of each prompt from a position on, without its last token."""
        used, where = [0] * self.data_shards, []
        for place in places:
            where.append(
                (place.shard * PREFILL_ROWS + used[place.shard], slice(len(place.sample.prompt) - 1 - first))
            )
            used[place.shard] += 1
        return where

    def _copies(self, copies: Sequence[tuple[int, int, int]]) -> Any:
        copy_pages = np.zeros((self.data_shards, COPIES, 2), np.int32)
        for number, (shard, *from_to) in enumerate(copies):
            copy_pages[shard, number] = from_to
        return rows_to_devices(self.mesh, copy_pages.reshape(-1, 2))

    def _prompts(self, places: Sequence[Place], first: int = 0) -> Any:
        """Put rows and pages on the device."""
        shape = self.prefill_shape
        tokens, targets, segments, positions, pages = np.zeros((5, *shape), np.int32)
        slots = np.zeros(shape[0], np.int32)
        for place, (row, columns) in zip(places, self.prefill_places(places, first), strict=True):
            prompt, order = place.sample.prompt, first + np.arange(columns.stop)
            tokens[row, columns], targets[row, columns] = prompt[first:-1], prompt[first + 1 :]
            segments[row, columns], positions[row, columns] = 1, order
            pages[row, columns], slots[row] = place.pages[order // PAGE_SIZE], place.sample.slot
        model, experts = self.engine.model, None
        if model.n_experts:
            experts = np.full((*shape, model.n_layers, model.experts_per_token), -1, np.int16)
        rows = Rows(tokens, targets, segments, positions, slots, experts)
        return rows_to_devices(self.mesh, (rows, pages))

    def decode(
        self, places: Sequence[Place], rows: int = 4, width: int = 8, steps: int = MOST_STEPS
    ) -> list[Drawn]:
        """Run one dispatch of ``rows`` rows per data shard; a table has ``width`` pages."""
        return self.decode_all(places, rows, width, steps)[0]

    def decode_top(self, places: Sequence[Place], top: int) -> list[Drawn]:
        """The same, with the likeliest tokens of every step."""
        return self.decode_all(places, top=top)[0]

    def decode_all(
        self, places: Sequence[Place], rows: int = 4, width: int = 8, steps: int = MOST_STEPS, top: int = 0
    ) -> tuple[list[Drawn], Drawn]:
        """The same, and the whole reply [K, B]."""
        count = rows * self.data_shards
        batch = DecodeRows(
            *(np.full(count, fill, np.int32) for fill in (-1, 0, 0, 0, 0)),
            seeds=np.zeros((count, 2), np.uint32),
            temperatures=np.ones(count, np.float32),
            top_k=np.full(count, MODEL.vocab_size, np.int32),
            top_p=np.ones(count, np.float32),
            stop_tokens=np.full((count, 8), -1, np.int32),
        )
        tables = np.zeros((count, width), np.int32)
        where = [place.shard * rows + place.row for place in places]
        for place, row in zip(places, where, strict=True):
            sample = place.sample
            batch.source[row], batch.slots[row], batch.seeds[row] = place.source, sample.slot, sample.seed
            batch.temperatures[row], batch.top_k[row] = sample.temperature, sample.top_k
            batch.top_p[row], batch.stop_tokens[row, : len(sample.stops)] = sample.top_p, sample.stops
            tables[row, : len(place.pages)] = place.pages[:width]
            if place.source < 0:
                batch.tokens[row], batch.positions[row] = sample.prompt[-1], len(sample.prompt) - 1
                batch.remaining[row] = sample.max_tokens
        placed = rows_to_devices(self.mesh, (tables, batch))
        state = (self.engine.base, self.bank, self.cache, self.rows, self.next_rows)
        self.cache, after, drawn = self._decode(top)(*state, *placed, None, np.int32(0), np.int32(steps))
        self.rows, self.next_rows = after, self.rows
        wanted = [getattr(drawn, name) for name in Drawn.__dataclass_fields__]
        parts = to_numpy([np.zeros(drawn.tokens.shape) if part is None else part for part in wanted])
        return [Drawn(*(part[:steps, row] for part in parts)) for row in where], Drawn(*parts)

    def _place(self, arrays: Any, declared: Any) -> Any:
        return jax.tree.map(to_devices, arrays, shardings(self.mesh, declared))

    def _filled(self, declared: Any, value: float) -> Any:
        full = jax.tree.map(
            lambda weight: np.full(weight.shape, value, weight.dtype),
            declared,
            is_leaf=lambda leaf: isinstance(leaf, Weight),
        )
        return self._place(full, declared)


def stand(samples: Sequence[Sample], rows: Sequence[int] | None = None, shards: int = 1) -> list[Place]:
    """Deal samples to the data shards, each with its own pages, from page 1 of the shard."""
    free, places = [1] * shards, []
    for index, sample in enumerate(samples):
        shard = index % shards
        row = index // shards if rows is None else rows[index]
        pages = sample.pages(free[shard])
        free[shard] += len(pages)
        places.append(Place(sample, pages, row, shard))
    return places


def go_on(places: Sequence[Place]) -> list[Place]:
    """Return the same places for the next dispatch."""
    return [Place(place.sample, place.pages, place.row, place.shard, source=place.row) for place in places]


def run(sampler: TinySampler, places: Sequence[Place], **how: int) -> list[Drawn]:
    """Run a prefill, then two dispatches."""
    sampler.prefill([place for place in places if len(place.sample.prompt) > 1])
    first, second = sampler.decode(places, **how), sampler.decode(go_on(places), **how)
    return [(a + b).living() for a, b in zip(first, second, strict=True)]


def tiny_sampler(
    shape: tuple[int, int, int] = (1, 1, 1),
    dtype: str = "float32",
    kind: str = "dense",
    split_base: bool = False,
) -> TinySampler:
    """One of each for the whole test session; ``reset`` it before use."""
    return _tiny_sampler(shape, dtype, kind, split_base, is_compiled_quickly())


@functools.cache
def _tiny_sampler(
    shape: tuple[int, int, int], dtype: str, kind: str, split_base: bool, _: bool
) -> TinySampler:
    dtypes = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
    return TinySampler(tiny_engine(shape, dtype, kind, split_base), dtypes[dtype])
