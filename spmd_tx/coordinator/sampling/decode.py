"""Builds the Decode command for chosen samples. Pure."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
from msgspec.structs import replace

from spmd_tx.coordinator.grammar.guide import WORD
from spmd_tx.coordinator.sampling.job import Sample
from spmd_tx.coordinator.sampling.programs import DecodeShape
from spmd_tx.coordinator.sampling.request.row_settings import of_nobody, settings_columns
from spmd_tx.coordinator.sampling.speculation.guess import Guess
from spmd_tx.protocol.commands import DRAFT_TOKENS, Decode

FRESH = -1  # source of a row whose state comes from the coordinator
DRAW = -1  # in place of a token that is not known
COLUMNS = "source", "slots", "page_places", "page_counts", "states", "tokens", "positions", "remaining"
OF_NOBODY: tuple[int, ...] = (FRESH, *[0] * (len(COLUMNS) - 1))  # a row of these columns
NO_MASK = NO_DRAFT = -1


def decode_command(
    chosen: list[list[Sample]],
    steps: int,
    shape: DecodeShape,
    last_decode: int,
    vocab_size: int,
    *,
    has_states: bool = False,
) -> Decode:
    """Return the command for the ``chosen`` samples of each data shard; ``shape`` must be large enough."""
    program, rows = shape.program, shape.rows
    has_images = any(sample.job.sight for samples in chosen for sample in samples)
    count = rows * len(chosen)
    placed = [place for shard, samples in enumerate(chosen) for place in rows_of(samples, shard * rows)]
    columns = _columns(placed, count, last_decode, vocab_size)
    if not has_states:
        del columns["states"]
    command = Decode(
        steps=steps,
        **columns,
        top=program.top,
        active=program.active,
        block=shape.block,
        forced=np.full((count, shape.known_steps), DRAW, np.int32) if shape.known_steps else None,
        shifts=np.zeros(count, np.int32) if has_images else None,
        mask_places=np.full((count, shape.known_steps), NO_MASK, np.int32) if program.masked else None,
        depths=np.zeros(count, np.int32) if program.speculative else None,
        drafts=np.full((count, DRAFT_TOKENS), NO_DRAFT, np.int32) if program.speculative else None,
    )
    if not (has_images or shape.known_steps or program.speculative):
        return command
    masks = dict[int, tuple[int, np.ndarray]]()  # each with its place; by their ids
    for row, sample in placed:
        if command.shifts is not None and sample.job.sight is not None:
            command.shifts[row] = sample.job.sight.shift
        if command.forced is not None and sample.behind:
            fed = sample.tokens[-sample.behind :][:steps]
            command.forced[row, : len(fed)] = fed
        if program.masked and sample.is_masked:
            _constrain(command, row, sample, masks)
        if sample.guess is not None:
            _follow(command, row, sample.guess)
    if not program.masked:
        return command
    words = -(-vocab_size // WORD)
    return replace(
        command,
        masks=np.stack([mask for _, mask in masks.values()]) if masks else np.zeros((0, words), np.uint32),
    )


def rows_of(samples: Iterable[Sample], first: int = 0) -> Iterator[tuple[int, Sample]]:
    """Yield each sample with its row; behind it are those of its followers."""
    for sample in samples:
        row, first = first, first + 1 + (0 if sample.guess is None else sample.guess.followers)
        yield row, sample


def _follow(command: Decode, leader: int, guess: Guess) -> None:
    """Let rows behind a row read what is likely to follow.

    They have its adapter; its pages, and their places in its sequence, are found on the device.
    """
    assert command.depths is not None
    assert command.drafts is not None
    command.drafts[leader, : len(guess.drafts)] = guess.drafts
    for depth in range(1, 1 + guess.followers):
        row = leader + depth
        command.depths[row] = depth
        command.slots[row] = command.slots[leader]
    if command.states is not None:
        command.states[leader + 1 : leader + 1 + guess.followers] = guess.slots or command.states[leader]


def _constrain(command: Decode, row: int, sample: Sample, masks: dict[int, tuple[int, np.ndarray]]) -> None:
    """Say what is known of the next tokens of a row, behind those that are fed again."""
    guide, fed = sample.guide, sample.behind
    assert guide is not None
    assert command.forced is not None
    assert command.mask_places is not None
    known = guide.ahead[: max(0, command.steps - fed)]
    command.forced[row, fed : fed + len(known)] = known
    place = fed + len(guide.ahead)
    for step, mask in enumerate(guide.likely_masks[: max(0, command.steps - place)], place):
        command.mask_places[row, step], _ = masks.setdefault(id(mask), (len(masks), mask))


def _columns(
    placed: list[tuple[int, Sample]], count: int, last_decode: int, vocab_size: int
) -> dict[str, Any]:
    """Return the columns for so many rows, and the pages that come to rows."""
    of_rows, settings, pages = [OF_NOBODY] * count, [of_nobody(vocab_size)] * count, list[int]()
    for row, sample in placed:
        settings[row] = sample.settings
        if sample.guess is not None:
            settings[row + 1 : row + 1 + sample.guess.followers] = [sample.settings] * sample.guess.followers
        bank, state, held = sample.bank, sample.state, len(sample.pages)
        if sample.decode == last_decode and not sample.begins_anew:  # its state is on the device
            had = sample.placed
            of_rows[row] = sample.row, bank, had, held - had, state, 0, 0, 0
            pages += sample.pages[had:]
        else:
            fresh = _next_token(sample), sample.next_position, sample.steps_left
            of_rows[row] = FRESH, bank, 0, held, state, *fresh
            pages += sample.pages
    table = np.fromiter(chain.from_iterable(of_rows), np.int32, count * len(COLUMNS)).reshape(count, -1)
    columns = zip(COLUMNS, np.ascontiguousarray(table.T), strict=True)
    return {**dict(columns), **settings_columns(tuple(settings)), "pages": np.fromiter(pages, np.int32)}


def _next_token(sample: Sample) -> int:
    prompt, position = sample.job.prompt, sample.next_position
    return prompt[position] if position < len(prompt) else sample.tokens[position - len(prompt)]
