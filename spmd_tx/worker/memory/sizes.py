"""The inputs of a memory plan besides the memory: options, model and mesh, and sizes derived from them.

No array is made and no device is needed: an AbstractMesh is enough.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from spmd_tx.models.adapters.lora import adapter_weights
from spmd_tx.models.attention.kv_cache import cache_weights
from spmd_tx.models.base_weights import weights
from spmd_tx.models.declared.model import Model, met
from spmd_tx.models.declared.tower import MERGED
from spmd_tx.models.linear_attention.state_pool import pool_weights
from spmd_tx.models.remat import REMAT_LEVELS, computed_twice
from spmd_tx.models.vision.tower_weights import Sight, sight
from spmd_tx.protocol.commands import CHUNK_STEPS, PREFILL_TOKENS, padded_patches
from spmd_tx.protocol.kernels import Platform
from spmd_tx.protocol.setup import SHORTEST_ROW, Setup, longest_row
from spmd_tx.sharding.mesh import DATA, FSDP, TP, AnyMesh
from spmd_tx.worker.steps.full import full_state
from spmd_tx.worker.steps.train_state import train_weights

REPLICATED_SHARE = 0.5  # of a device's memory: the most that base weights may take before fsdp splits them
TRAIN_TOKENS = (8192, 4096, 2048, 1024, 512)  # larger micro-batches are hardly faster,
TP_OF_MOST = 4  # but on GPUs where tp is larger, starting operations takes longer than the arithmetic
CPU_TRAIN_TOKENS = 4096  # a sample waits for two micro-batches at most
USUAL_LENGTH = 2048  # tokens of a sequence, to judge how fast a plan is
FEWER_ROWS = 4  # divides the rows of decode when a plan does not fit
# Of the pool of images' tokens, where its size is left to the server: those of two of the largest images, and
# of two parts of prompts.
MOST_IMAGE_VECTORS = 34 << 10
KEPT_PROMPTS = 4  # states of prompts whose later samples wait, where no prefix cache keeps them


class BatchShape(NamedTuple):
    """Holds the shape of a batch: rows of one data shard, and tokens of a row."""

    rows: int
    length: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True)
class Sizes:
    """Holds the inputs. Tokens, rows and pages are per data shard, bytes per device."""

    setup: Setup
    model: Model
    mesh: AnyMesh
    dtype: DTypeLike

    @property
    def longest_row(self) -> int:
        """The tokens of the longest row of training and prefill."""
        return self.setup.longest_row or longest_row(self.setup.max_context)

    @property
    def widest_table(self) -> int:
        """The tokens for which the pages of a row have room."""
        return -(-self.setup.max_context // self.setup.page_size) * self.setup.page_size

    @property
    def least_pages(self) -> int:
        """The pages with which one sequence of full length can finish."""
        setup = self.setup
        return -(-(setup.max_context + 2 * setup.decode_steps) // setup.page_size) + 2

    def ways_to_split(self, memory: int) -> list[bool]:
        """Return whether to split the base weights over fsdp: the choices to try, the better first."""
        fsdp, wish = self.mesh.shape[FSDP], self.setup.shard_base_weights
        if fsdp == 1 or wish == "no":
            return [False]
        if wish == "yes":
            return [True]
        packed = (each for each in self.model.packed if each.split == "columns")
        groups = [each.width_in // each.kept.group for each in packed]
        if any(count % fsdp for count in (*self.model.outer_widths, *groups)):
            return [False]
        return [True] if self.whole_base > REPLICATED_SHARE * memory else [False, True]

    def slot_choices(self) -> "Iterator[Sizes]":
        """Yield these sizes for each number of training slots to try, the most first."""
        slots = self.setup.adapter_slots
        yield self
        while self.setup.may_have_fewer_slots and (slots := slots // 2):
            yield replace(self, setup=msgspec.structs.replace(self.setup, adapter_slots=slots))

    def row_counts(self) -> list[int]:
        """Return how many rows to decode at once: the choices to try, the most first."""
        counts = [self.setup.decode_rows]
        while counts[-1] > 1:
            counts.append(max(1, counts[-1] // FEWER_ROWS))
        return counts

    def train_tokens(self, platform: Platform) -> list[int]:
        """Return the maximum tokens of a micro-batch: the choices to try, the most first; 0: no training."""
        if not self.setup.trains:
            return [0]
        if self.setup.train_tokens:
            return [self.setup.train_tokens]
        if platform == "cpu":
            return [CPU_TRAIN_TOKENS]
        more = self.mesh.shape[TP] // TP_OF_MOST if platform == "gpu" else 1
        return [*([more * TRAIN_TOKENS[0]] if more > 1 else []), *TRAIN_TOKENS]

    def usual_shape(self, tokens: int) -> BatchShape:
        """Return the largest batch of usual rows with at most so many tokens."""
        length = min(tokens, USUAL_LENGTH, self.longest_row)
        return BatchShape(max(1, tokens // length), length)

    def shapes(self, tokens: int) -> list[BatchShape]:
        """Return the largest batch of each row length, with at most so many tokens, or one row.

        Lengths between the powers of two are left out: they need less than the next one.
        """
        lengths = [SHORTEST_ROW]
        while lengths[-1] < self.longest_row:
            lengths.append(min(2 * lengths[-1], self.longest_row))
        return [BatchShape(max(1, tokens // length), length) for length in lengths]

    def prefill_shapes(self) -> list[BatchShape]:
        """Return the same for prefills."""
        return [shape for shape in self.shapes(PREFILL_TOKENS) if shape.tokens <= PREFILL_TOKENS]

    def continued_shapes(self, platform: Platform) -> list[BatchShape]:
        """Return the same for prefills whose rows continue after what the widest tables hold."""
        one_by_one = platform == "cpu" or self.setup.batch_invariant  # a program takes one row
        longest = BatchShape(1, min(PREFILL_TOKENS, self.longest_row))
        shapes = self.prefill_shapes()
        return [longest, *(BatchShape(1 if one_by_one else rows, length) for rows, length in shapes)]

    def base(self, splits: bool) -> int:
        """Return the base weights, with the other copies from which samplers draw."""
        declared = weights(self.model, self.mesh, self.dtype, split_over_fsdp=splits)
        return max(1, self.setup.full_copies) * bytes_per_device(self.mesh, declared)

    @cached_property
    def numbers_met(self) -> float:
        """The numbers of the base weights with which a device multiplies a token."""
        return self.model.numbers_met(self.mesh.shape[TP])

    @cached_property
    def draft_cost(self) -> float:
        """How much longer a step takes in which the model makes drafts; 0: it makes none."""
        tp, model = self.mesh.shape[TP], self.model
        head = model.d_model * model.vocab_size / tp
        return (met(model.mtp_arrays, tp) + head) / self.numbers_met if model.mtp is not None else 0.0

    @cached_property
    def computed_twice(self) -> dict[str, float]:
        """How many of them the backward pass multiplies once more, by level."""
        tp = self.mesh.shape[TP]
        return {level: computed_twice(self.model, level, tp) for level in REMAT_LEVELS}

    @cached_property
    def whole_base(self) -> int:
        """The base weights if fsdp does not split them."""
        return self.base(splits=False)

    @cached_property
    def adapters(self) -> int:
        """The state of training, of adapters or of all weights; 0: nothing is trained."""
        if self.setup.full_copies:
            state = full_state(self.model, self.mesh)  # refuses other models, also for samplers
            return bytes_per_device(self.mesh, state) if self.setup.trains else 0
        if not self.setup.trains:
            return 0
        slots, rank = self.setup.adapter_slots, self.setup.max_rank
        return bytes_per_device(self.mesh, train_weights(self.model, self.mesh, slots, rank))

    @cached_property
    def gradient(self) -> int:
        """The gradient of all weights, if they are trained; else 0."""
        if not self.setup.full_copies:
            return 0
        return bytes_per_device(self.mesh, full_state(self.model, self.mesh).grad_sum)

    @cached_property
    def bank(self) -> int:
        slots, rank = self.setup.bank_slots, self.setup.max_rank
        declared = adapter_weights(self.model, self.mesh, slots, rank, self.dtype, zero=False)
        return bytes_per_device(self.mesh, declared)

    @cached_property
    def page(self) -> int:
        declared = cache_weights(self.model, self.mesh, 1, self.setup.page_size, self.dtype)
        return bytes_per_device(self.mesh, declared)

    @cached_property
    def state(self) -> int:
        """The states of one sequence, of all layers; 0 if they keep none."""
        mixer = self.model.stateful
        if mixer is None:
            return 0
        layers = self.model.n_layers - self.model.n_paged
        return bytes_per_device(self.mesh, pool_weights(mixer, self.mesh, layers, 1, self.dtype))

    def state_slots(self, rows: int) -> int:
        """Return the slots for states: that of zeros, one for each row of decode, and the snapshots."""
        if not self.state:
            return 0
        budget = self.setup.state_cache_bytes
        if budget is not None:
            return 1 + rows + budget // self.state
        return 1 + rows + (min(rows, KEPT_PROMPTS) if self.setup.batch_invariant else rows)

    @cached_property
    def image_tokens(self) -> int:
        """The rows of the pool for tokens of images; 0: only text is read."""
        setup, tower = self.setup, self.model.tower
        if tower is None:
            return 0
        if setup.image_tokens is not None:
            return setup.image_tokens
        tokens = max(self.train_tokens(setup.kernels.platform)[0], PREFILL_TOKENS)
        most = MOST_IMAGE_VECTORS // tower.planes
        return max(min(most, self.data_shards * tokens), self.most_of_image)

    @cached_property
    def sight(self) -> Sight | None:
        """What it takes to read images; None: only text is read."""
        tower, rows = self.model.tower, self.image_tokens
        return None if tower is None or not rows else sight(tower, rows, self.mesh, self.dtype)

    @cached_property
    def of_images(self) -> int:
        """The bytes of that."""
        return 0 if self.sight is None else bytes_per_device(self.mesh, self.sight)

    @property
    def most_of_image(self) -> int:
        """The most tokens of one image."""
        return min(self.setup.image_tokens_each, self.setup.max_context)

    @property
    def most_patches(self) -> int:
        """The patches of the largest image, padded: its tokens have room in the pool and in the context."""
        return padded_patches(MERGED * min(self.image_tokens, self.most_of_image))

    @property
    def chunk_part(self) -> int:
        """The tokens of a prompt that a step of a decode may read beside its rows; 0: it never does."""
        setup = self.setup
        never = setup.batch_invariant or bool(self.state) or setup.kernels.platform == "cpu"
        return 0 if never else PREFILL_TOKENS // CHUNK_STEPS

    @property
    def data_shards(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in DATA)


def bytes_per_device(mesh: AnyMesh, declared: Any) -> int:
    """Return the bytes of declared arrays on one device."""
    total = 0
    for weight in jax.tree.leaves(declared):
        local = NamedSharding(mesh, weight.spec).shard_shape(weight.shape)
        total += jnp.dtype(weight.dtype).itemsize * math.prod(local)
    return total
