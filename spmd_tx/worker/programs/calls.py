"""The program and arguments of each command, both to run it and to compile it ahead."""

from collections.abc import Iterator
from functools import cache, partial

import jax
import numpy as np
from jax.sharding import Mesh

from spmd_tx.models.attention.chunk import ChunkTokens
from spmd_tx.protocol import commands
from spmd_tx.protocol.commands import MASKS_OF_ROW, active_sizes
from spmd_tx.sharding.mesh import AXES
from spmd_tx.worker.blocks import blocks
from spmd_tx.worker.memory.plan import Plan
from spmd_tx.worker.programs.adapters import AdapterPrograms
from spmd_tx.worker.programs.call import Call, int32
from spmd_tx.worker.programs.tables import table_changes
from spmd_tx.worker.programs.whole_models import ModelPrograms
from spmd_tx.worker.state import WorkerState
from spmd_tx.worker.steps.decode_rows import DecodeRows
from spmd_tx.worker.steps.images import make_encode_images
from spmd_tx.worker.steps.losses import TokenLossInputs
from spmd_tx.worker.steps.pages import make_copy_pages, make_copy_states, make_place_tables
from spmd_tx.worker.steps.prompt_scores import ScoreInputs, Widths
from spmd_tx.worker.steps.sample import make_decode, make_prefill
from spmd_tx.worker.steps.train import Rows


class Calls:
    """Makes the calls of an engine's steps. ``state`` is the worker's, or has ShapeDtypeStructs."""

    def __init__(self, plan: Plan, mesh: Mesh, declared: WorkerState) -> None:
        model, setup = plan.sizes.model, plan.sizes.setup
        kernels = setup.kernels
        self.plan, self.mesh, self.declared = plan, mesh, declared
        self._setup, self._model = setup, model
        self._shards = plan.sizes.data_shards
        kind = ModelPrograms if setup.full_copies else AdapterPrograms
        self.trained: AdapterPrograms | ModelPrograms = kind(plan, mesh, declared)
        sampling = (model, mesh, declared.base, declared.bank, declared.cache)
        prefill = partial(make_prefill, *sampling, kernels=kernels)
        self._prefill = cache(lambda logprobs, widths: prefill(logprobs=logprobs, widths=widths))
        decode, invariant = partial(make_decode, *sampling, setup.decode_steps), setup.batch_invariant
        self._decode = cache(lambda top: decode(top, kernels=kernels, batch_invariant=invariant))
        tower, images = declared.tower, declared.base.images
        self._encode_images, self._sees = None, bool(plan.sizes.image_tokens)
        if tower is not None and images is not None:
            self._encode_images = make_encode_images(model, mesh, tower, images, kernels)
        self._copy_pages = make_copy_pages(mesh, declared.cache)
        self._copy_states = make_copy_states(mesh, declared.cache)
        self._place_tables = make_place_tables(mesh, declared.tables)

    def forward_backward(self, state: WorkerState, command: commands.ForwardBackward) -> Iterator[Call]:
        """Yield the call of each block. It takes the gradient that the one before has left in ``state``."""
        name, shape = self._program(command)
        step = self.trained.forward_backward[self.plan.level(shape[0] // self._shards, shape[1])]
        batch = self._batch(command.rows, command.loss)
        for block in blocks(batch, self._shards, command.block):
            yield Call(name, shape, step, self.trained.differentiated(state), block)

    def forward(self, state: WorkerState, command: commands.Forward) -> Iterator[Call]:
        """Yield the call of each block."""
        name, shape = self._program(command)
        for block in blocks(self._batch(command.rows, command.loss), self._shards, command.block):
            yield Call(name, shape, self.trained.forward, self.trained.evaluated(state), block)

    def _program(self, command: commands.Forward | commands.ForwardBackward) -> tuple[str, tuple[int, ...]]:
        """Return the name of a command's program and its shape, which depend on the arrays that it has."""
        step = "forward" if isinstance(command, commands.Forward) else "forward_backward"
        name = step if command.loss.ratio_mask is None else f"{step} of sequences"
        rows, *rest = command.rows.targets.shape
        return name, (self._shards * command.block or rows, *rest)

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
        fields = {name: getattr(command, name) for name in DecodeRows.__dataclass_fields__}
        of_rows, of_chunk = slots[: command.slots.size], slots[command.slots.size :]
        fields |= {"slots": of_rows, "shifts": self._shifts(command)}
        if (chunk := command.chunk) is not None:
            following = np.roll(chunk.tokens, -1, axis=1)
            fields["chunk"] = ChunkTokens(
                *(chunk.tokens, chunk.positions, chunk.pages, of_chunk, chunk.tables, following)
            )
        if command.masks is not None and command.mask_places is not None:
            fields |= masks_of_rows(command.masks, command.mask_places)
        top, shards = command.top, self._shards
        adapters = self._setup.bank_slots if active is None else active.size
        shape = (shards * command.block or len(of_rows), adapters, *([top] if top else []))
        step, name = self._decode(top), "decode" if command.masks is None else "masked decode"
        name = name if command.drafts is None else f"speculative {name}"
        if chunk is not None:
            name, shape = f"{name} beside a chunk", (*shape, *chunk.tokens.shape[1:])
        for number, block in enumerate(blocks(DecodeRows(**fields), shards, command.block)):
            rest = (active, int32(number * command.block), int32(command.steps))
            arrays = (state.base, state.bank, state.cache, state.rows, state.next_rows, state.tables)
            yield Call(name, shape, step, arrays, (block,), rest, variant=top)

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
        places = None
        if self._sees:  # filled in, too, so that text uses the programs of images
            places = np.repeat(rows.positions[..., None], 3, axis=2) if rows.places is None else rows.places
        return Rows(
            rows.tokens, rows.targets, rows.segments, rows.positions, rows.slots, experts, places=places
        )

    def _shifts(self, command: commands.Decode) -> np.ndarray | None:
        if not self._sees:
            return None
        return np.zeros_like(command.positions) if command.shifts is None else command.shifts

    def encode_images(self, state: WorkerState, command: commands.EncodeImages) -> Call:
        """Return the call; devices without an image get one without patches."""
        assert self._encode_images is not None, "no images without a pool"
        devices, patches = self.mesh.size, command.patches.shape[1]
        images = _filled(command.patches, devices, 0), _filled(command.grids, devices, 0)
        rest = (_filled(command.rows, devices, -1),)
        arrays = (state.tower, state.base.images)
        return Call("encode_images", (patches,), self._encode_images, arrays, images, rest, axes=AXES)


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


def masks_of_rows(masks_MW: np.ndarray, places_BK: np.ndarray) -> dict[str, np.ndarray]:
    """Return fields of DecodeRows: the masks of every row, and which of them counts in a step.

    The arguments are ``masks`` and ``mask_places`` of a Decode.
    """
    by_row = np.zeros((len(places_BK), MASKS_OF_ROW, masks_MW.shape[1]), np.uint32)
    places = np.full_like(places_BK, -1)
    for row in np.flatnonzero((places_BK >= 0).any(axis=1)):
        has_mask = places_BK[row] >= 0
        used, places[row, has_mask] = np.unique(places_BK[row, has_mask], return_inverse=True)
        by_row[row, : len(used)] = masks_MW[used]
    return {"masks": by_row, "mask_places": places}


def _filled(array: np.ndarray, count: int, value: int) -> np.ndarray:
    """Return the array with as many entries along its first dimension, the further ones of this value."""
    whole = np.full((count, *array.shape[1:]), value, array.dtype)
    whole[: len(array)] = array
    return whole


def _active_slots(command: commands.Decode, bank_slots: int) -> tuple[np.ndarray | None, np.ndarray]:
    """Return the bank slots that live rows use, and every row's index among them; None: the whole bank.

    Behind the rows come those of chunks. The number of slots comes from a short menu, because each number
    needs its own program.
    """
    is_used, slots = (command.source >= 0) | (command.remaining > 0), command.slots
    if command.depths is not None:  # followers have neither of their own
        is_used |= command.depths > 0
    sizes = [command.active] if command.active else active_sizes(is_used.size, bank_slots)
    if command.chunk is not None:
        is_used = np.concatenate([is_used, (command.chunk.positions >= 0).any(axis=1)])
        slots = np.concatenate([slots, command.chunk.slots])
    used = sorted(set(slots[is_used].tolist())) or [0]
    size = next(size for size in sizes if size >= len(used))
    if size == bank_slots:
        return None, np.where(is_used, slots, np.int32(0))
    index = np.zeros(bank_slots, np.int32)
    index[used] = range(len(used))
    return np.array((used * size)[:size], np.int32), np.where(is_used, index[slots], np.int32(0))
