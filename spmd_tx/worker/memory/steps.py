"""Estimates how much memory the steps need while they run, besides the permanent arrays, without compiling.

The estimates model what the steps hold at their peak. How many of each intermediate exist at once was read
from XLA's memory analysis of the compiled programs, with which tests compare them. On accelerators the
programs are measured when workers start, and the estimates are corrected.

Bytes are per device, rows per data shard.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import jax.numpy as jnp

from spmd_tx.models.adapters import lora
from spmd_tx.models.attention.blockwise import QUERIES_AT_ONCE, blocks
from spmd_tx.models.attention.packed_rows import QUERY_BLOCK
from spmd_tx.models.attention.page_loop import SEVERAL_PAGES
from spmd_tx.models.declared.delta_rule import DeltaRule
from spmd_tx.models.declared.layers import StackPlace
from spmd_tx.models.declared.maps import Map, parts
from spmd_tx.models.declared.model import FACTORS, HEAD, Adapted, Model
from spmd_tx.models.experts.layout import Choices
from spmd_tx.models.experts.moe import GROUP_ELEMENTS, is_small
from spmd_tx.models.linear_attention.delta_rule import CHUNK, SPAN
from spmd_tx.models.long_rows import parts_of
from spmd_tx.models.remat import REMAT_LEVELS
from spmd_tx.protocol.commands import MAX_TARGETS
from spmd_tx.protocol.kernels import Platform
from spmd_tx.sharding.mesh import EP, FSDP, TP, AnyMesh
from spmd_tx.worker.memory.images import encoding
from spmd_tx.worker.memory.sizes import BatchShape, Sizes
from spmd_tx.worker.steps.train import HEAD_TOKENS

FP32 = 4  # bytes
SEEN_AT_ONCE = 16 * SEVERAL_PAGES  # tokens of a row that the reference reads from its pages at once, of 16
REDZONES = 64 << 20  # bytes around arrays of a kernel that is tried: XLA looks for writes beyond their ends
LEVELS = tuple(REMAT_LEVELS)  # how much of a layer the backward pass recomputes, the least first

Amount = int | float  # of bytes, or of numbers
StepName = str  # "prefill", "continued prefill", "decode", or "train", a level, and one of LOSS_KINDS
# Kinds of programs of one level: with a loss per token, with one per sequence, and with several targets.
OF_SEQUENCES, OF_SEVERAL_TARGETS = " of sequences", " of several targets"
LOSS_KINDS = ("", OF_SEQUENCES, OF_SEVERAL_TARGETS)


@dataclass(frozen=True)
class StepMemory:
    """Estimates the steps of one model on one mesh."""

    sizes: Sizes
    platform: Platform
    splits_base: bool  # so that weights are gathered over fsdp, layer by layer
    corrections: Mapping[StepName, float] = field(default_factory=dict)  # measured bytes over estimated ones

    @property
    def model(self) -> Model:
        return self.sizes.model

    @property
    def mesh(self) -> AnyMesh:
        return self.sizes.mesh

    @property
    def max_rank(self) -> int:
        return self.sizes.setup.max_rank

    @cached_property
    def itemsize(self) -> int:
        """The bytes of a number in the compute dtype."""
        return jnp.dtype(self.sizes.dtype).itemsize

    def train(self, level: str, shape: BatchShape) -> int:
        """Return the bytes of forward_backward, the largest of the training steps, with any loss."""
        return max(self.train_with(kind, level, shape) for kind in LOSS_KINDS)

    def train_with(self, kind: str, level: str, shape: BatchShape) -> int:
        """Return the bytes of forward_backward with one kind of losses, of LOSS_KINDS."""
        saved = self.saved(level, shape)
        part = self._part(level, shape)
        again = 0 if level == "none" else self._kept(shape.tokens, part.tokens) + self._factors(shape.rows)
        layer = again + self._slopes(shape.tokens, part.tokens)
        queries = QUERY_BLOCK if shape.length > 2 * QUERY_BLOCK else shape.length
        layer += 3 * FP32 * self._scores(shape, queries)
        layer += self._chunks(shape, copies=12) + 2 * self._decoded
        working = max(layer + self._experts(part, FP32 * 8, trains=True), self._head(shape, copies=3))
        if self.sizes.setup.full_copies:
            whole = self._all_trained
        else:
            whole = self._trained(shape.rows) + self._gathered_base + self._head_factors(shape.rows)
        per_token = {"": 0, OF_SEQUENCES: 4, OF_SEVERAL_TARGETS: 4 * MAX_TARGETS}[kind]
        estimate = saved + working + self._stream(shape, 4) + whole + shape.tokens * per_token * FP32
        return self._corrected(f"train {level}{kind}", estimate, like=f"train {level}")

    def _part(self, level: str, shape: BatchShape) -> BatchShape:
        """Return what of a batch is in a feed-forward block at once."""
        if self.sizes.setup.full_copies:
            return shape
        return BatchShape(shape.rows, shape.length // parts_of(shape.length, level))

    def saved(self, level: str, shape: BatchShape) -> Amount:
        """Return the bytes that all layers keep for the backward pass."""
        return self.model.n_layers * self._saved(level, shape)

    def prefill(self, shape: BatchShape, table_tokens: int) -> int:
        """``table_tokens``: what the pages of a row hold, for rows that continue after them; else 0."""
        seen = min(table_tokens, SEEN_AT_ONCE)
        keys = 3 * shape.rows * seen * 2 * self._key_values * self.itemsize
        queries = min(blocks(shape.length)[0][1], QUERIES_AT_ONCE)
        scores = self._heads * shape.tokens * seen if table_tokens else self._scores(shape, queries)
        held = self.itemsize * self._numbers(2, 1, 1, 2) + FP32 * self._numbers(1, 0, 0, 1)
        layer = shape.tokens * held + keys + self._factors(shape.rows) + 2 * FP32 * scores
        layer += self._chunks(shape, copies=6) + self._decoded
        working = max(layer + self._experts(shape, FP32 * 4), self._head(shape, copies=2))
        whole = self._stream(shape, 2) + self._gathered_base + self._head_factors(shape.rows)
        step = "continued prefill" if table_tokens else "prefill"
        return self._corrected(step, working + whole, like="prefill")

    def decode(self, rows: int, table_tokens: int, part: int = 0) -> int:
        """Return the bytes of one token per row, and a part of a prompt, with all of the bank's adapters."""
        seen = min(table_tokens, SEEN_AT_ONCE)
        pools = 2 if self.model.keeps_values else 1  # keys, and values unless they are the same
        keys = 1.5 * (rows + bool(part)) * seen * pools * self._key_values * self.itemsize
        logits = 6 * rows * self.model.vocab_size * FP32
        rows += part
        scores = 2 * rows * self._heads * (seen + 4 * self.model.head_dim) * FP32
        working = max(keys + scores, 3 * rows * self._state, logits)
        working += self._experts(BatchShape(rows, 1), FP32 * 4) + self._decoded
        if self.splits_base:  # rows travel
            working += 4 * rows * self.mesh.shape[FSDP] * max(self.model.d_model, self.model.d_ff) * FP32
        return self._corrected("decode", self.sizes.bank + working)

    def encode(self, patches: int) -> int:
        """Return the bytes of an image of so many patches, padded, on its way through the tower."""
        assert self.model.tower is not None
        attention, devices = self.sizes.setup.kernels.images, self.mesh.size
        estimate = encoding(self.model.tower, patches, self.itemsize, attention, devices)
        return self._corrected("encode", estimate)

    @property
    def compiling(self) -> int:
        """The bytes that compiling takes beside a step: where GPUs try kernels for the largest product.

        XLA allocates both operands, the result, and a result to compare it with.
        """
        if self.platform != "gpu":
            return 0
        model, tokens = self.model, HEAD_TOKENS
        width = max(model.vocab_size / self._tp, self._width)
        operands = (tokens + width) * model.d_model * self.itemsize
        return int(operands + 2 * tokens * width * FP32) + REDZONES

    def _corrected(self, step: StepName, estimate: Amount, like: StepName = "") -> int:
        """Correct an estimate by what was measured of the step, or else of the one that it is ``like``."""
        return int(estimate * self.corrections.get(step, self.corrections.get(like, 1.0)))

    @cached_property
    def _tp(self) -> int:
        return self.mesh.shape[TP]

    @cached_property
    def _heads(self) -> int:
        return self.model.n_heads // self._tp

    @cached_property
    def _key_values(self) -> int:
        """The numbers in a token's keys, or in its values."""
        return max(1, self.model.n_kv_heads // self._tp) * self.model.head_dim

    @cached_property
    def _width(self) -> Amount:
        """The numbers of a token in a dense feed-forward block."""
        return 0 if self.model.n_experts else self.model.d_ff / self._tp

    def _numbers(self, stream: int, queries: int, key_values: int, width: int) -> Amount:
        """Return the numbers of a token, with so many arrays of each kind at once."""
        return (
            stream * self.model.d_model
            + queries * self._heads * self.model.head_dim
            + key_values * self._key_values
            + width * self._width
        )

    def _kept(self, tokens: int, in_block: int) -> Amount:
        """Return what a layer's backward pass needs of its forward pass, except the scores.

        ``in_block``: the tokens that are in the feed-forward block at once.
        """
        outside = self.itemsize * self._numbers(4, 3, 4, 0) + FP32 * self._numbers(3, 1, 2, 0)
        return tokens * outside + in_block * (4 * self.itemsize + 3 * FP32) * self._width

    def _slopes(self, tokens: int, in_block: int) -> Amount:
        """Return the gradients that a layer's backward pass holds at once."""
        outside = self.itemsize * self._numbers(1, 1, 1, 0) + FP32 * self._numbers(0, 0, 1, 0)
        return tokens * outside + in_block * (self.itemsize + FP32) * self._width

    def _saved(self, level: str, shape: BatchShape) -> Amount:
        """Return what one layer keeps for the backward pass."""
        entry = self._stream(shape, 1) / self._tp  # between the blocks tp splits the tokens
        if level == "full":
            return entry
        if level != "none":
            widths = 2 if level == "light" else 0
            return 2 * entry + shape.tokens * self.itemsize * self._numbers(0, 2, 2, widths)
        in_blocks = shape.length > 2 * QUERY_BLOCK  # whose scores are always recomputed
        scores = 0 if in_blocks else (FP32 + self.itemsize) * self._scores(shape, shape.length)
        # Norms keep what they are given, in fp32. Layers that run again hold more of it for a while.
        spared = self._numbers(1, 0, 1, 0) if self.itemsize < FP32 else self._numbers(3, 1, 2, 0)
        kept = self._kept(shape.tokens, shape.tokens) - shape.tokens * FP32 * spared
        return kept + scores + self._factors(shape.rows)

    def _stream(self, shape: BatchShape, copies: int) -> Amount:
        return copies * shape.tokens * self.model.d_model * self.itemsize

    def _scores(self, shape: BatchShape, queries: int) -> Amount:
        """Return how many attention scores so many queries of each row have; kernels hold none."""
        held = self.sizes.setup.kernels.rows == "reference"
        return shape.rows * self._heads * queries * shape.length if held else 0

    @cached_property
    def _state(self) -> Amount:
        """The bytes of one sequence's state of a layer with linear attention; 0: there are none."""
        mixer = self.model.stateful
        return mixer.state_bytes(self.itemsize) / self._tp if isinstance(mixer, DeltaRule) else 0

    def _chunks(self, shape: BatchShape, copies: int) -> Amount:
        """Return the bytes that linear attention holds: ``copies`` matrices of each chunk, and states.

        There is a state before each span, besides the one that is read.
        """
        mixer = self.model.stateful
        if not isinstance(mixer, DeltaRule):
            return 0
        span = CHUNK * SPAN
        tokens = shape.rows * min(shape.length, span)
        within = copies * tokens * CHUNK * mixer.v_heads / self._tp * FP32
        return within + (2 + shape.length // span) * shape.rows * self._state

    def _head(self, shape: BatchShape, copies: int) -> Amount:
        """Return the bytes of the logits held at once."""
        return copies * min(shape.tokens, HEAD_TOKENS) * self.model.vocab_size / self._tp * FP32

    def _factors(self, rows: int) -> Amount:
        """Return the bytes of each row's own LoRA factors, of one layer."""
        return 1.25 * rows * self.max_rank * self._widest_layer * self.itemsize / self._tp

    @cached_property
    def _widest_layer(self) -> int:
        return max(map(self._dense_widths, self.model.places))

    def _dense_widths(self, place: StackPlace) -> int:
        """Return the sum of the widths of a layer's factors that all tokens meet."""
        widths = 0
        for each in self.model.arrays(place):
            if not isinstance(each, Map) or each.group is None:
                continue
            if not each.experts:
                widths += each.width_in + each.width_out
            elif self.model.expert_lora == "shared-outer":
                widths += self.model.d_model
        return widths

    def _head_factors(self, rows: int) -> Amount:
        width = self.model.d_model + self.model.vocab_size / self._tp
        return 1.25 * rows * self.max_rank * width * self.itemsize

    @cached_property
    def _all_trained(self) -> Amount:
        """The gradient of all weights, beside what layers take: a layer, the embedding and the head.

        They are gathered and rounded, and their gradients are summed in fp32.
        """
        layer = (self.itemsize + FP32) * self._largest_layer
        return self.sizes.gradient + layer + 2 * (self.itemsize + 2 * FP32) * self._table

    def _trained(self, rows: int) -> Amount:
        """Return the bytes of the adapters in a step: gradients, and what is gathered of them over fsdp.

        Those are of the head and of one layer; where there are fewer rows than adapters, a layer's dense maps
        only get those of the rows, which _factors counts.
        """
        fsdp = self.mesh.shape[FSDP]
        slots = self.sizes.setup.adapter_slots
        used = min(slots, rows * fsdp * self.mesh.shape[EP])
        copies = 1 if used == slots else 2  # those in use are taken out of all
        total = copies * sum(self._adapter_numbers.values()) / fsdp
        if fsdp > 1:
            total += 2 * self._adapter_numbers[HEAD]
            for name, adapted in self.model.adapted.items():
                if name != HEAD and (rows >= used or adapted.map.experts):
                    total += 2 * self._adapter_numbers[name] / self.model.n_layers
        return used * total * FP32

    @cached_property
    def _adapter_numbers(self) -> dict[str, float]:
        """The numbers of one adapter's factors of each map, on a device, if fsdp does not split them."""
        return {name: sum(self._numbers_of(each)) for name, each in self.model.adapted.items()}

    def _numbers_of(self, adapted: Adapted) -> Iterator[float]:
        """Yield those of each factor; tp splits one of them, and ep experts."""
        for factor in FACTORS:
            devices = self._tp if (factor == "a") == (adapted.map.split == "rows") else 1
            devices *= self.mesh.shape[EP] if len(adapted.lead(factor)) == 2 else 1
            yield math.prod(adapted.shape(factor, self.max_rank)) / devices

    @cached_property
    def _expert_factors(self) -> float:
        """The numbers in an expert's own factors, of the largest adapter."""
        rank, inner = lora.rank_in_experts(self.model, self.max_rank), self.model.d_ff / self._tp
        return rank * 3 * (inner if self.model.expert_lora == "shared-outer" else self.model.d_model + inner)

    def _experts(self, shape: BatchShape, bytes_per_number: int, *, trains: bool = False) -> Amount:
        """Return what the experts hold for the rows of all devices of ep.

        Small ones run over all rows, some at once: ``bytes_per_number`` is of those. Others run over grouped
        pairs of a token and an expert.
        """
        if not self.model.n_experts:
            return 0
        ep = self.mesh.shape[EP]
        if not is_small(self.model) and not (self.splits_base and shape.length == 1):
            return self._grouped_experts(shape, trains)
        one = ep * shape.tokens * max(self.model.d_model, self.model.d_ff / self._tp)
        local = self.model.n_experts // ep
        together = min(local, max(1, GROUP_ELEMENTS // int(one)))
        factors = ep * shape.rows * self._expert_factors
        gates = 4 * shape.tokens * self.model.n_experts * FP32
        return together * (bytes_per_number * one + 2 * self.itemsize * factors) + gates

    def _grouped_experts(self, shape: BatchShape, trains: bool) -> Amount:
        """Return the same where pairs of a token and an expert are grouped by expert."""
        model, ep = self.model, self.mesh.shape[EP]
        local, rows = model.n_experts // ep, ep * shape.rows
        choices = Choices(rows, shape.length, model.experts_per_token, model.n_experts, local)
        tiling = choices.tiling(by_tile=False)
        wide, inner = model.d_model, model.d_ff / self._tp
        # The rows, and in training their gradients; what stands at all positions; what a chunk holds.
        of_rows = (2 if trains else 1) * rows * shape.length * wide
        of_chunk = tiling.chunk * (4 * wide + 10 * inner if trains else 3 * wide + 5 * inner)
        factors = (4 if trains else 2) * tiling.chunk // tiling.block * self._expert_factors
        numbers = of_rows + tiling.positions * wide + of_chunk + factors
        # TPUs decode packed experts layer by layer, since their kernel cannot read them.
        if self.platform == "tpu" and any(each.experts for each in model.packed):
            numbers += 3 * local * wide * inner
        gates = 4 * shape.tokens * model.n_experts * FP32
        return numbers * self.itemsize + 4 * tiling.positions * FP32 + gates

    @cached_property
    def _decoded(self) -> Amount:
        """The largest matrix that is decoded where it is multiplied, and what it is rounded from."""
        kept = [each for each in self.model.packed if not each.experts]
        return max((each.numbers for each in kept), default=0) * (self.itemsize + FP32) / self._tp

    @cached_property
    def _gathered_base(self) -> Amount:
        """The weights of a layer and of the head that fsdp splits and a step gathers."""
        if not self.splits_base:
            return 0
        return 2 * (self._largest_layer + self._table) * self.itemsize

    @cached_property
    def _largest_layer(self) -> Amount:
        """The numbers of a layer's linear maps on a device, where fsdp does not split them."""
        ep = self.mesh.shape[EP]

        def numbers(place: StackPlace) -> Amount:
            maps = (each for each in self.model.arrays(place) if isinstance(each, Map))
            return sum(each.numbers / parts(each, self._tp) / (ep if each.experts else 1) for each in maps)

        return max(map(numbers, self.model.places))

    @cached_property
    def _table(self) -> Amount:
        """The numbers of the embedding, or of the head, on a device."""
        return self.model.vocab_size * self.model.d_model / self._tp
