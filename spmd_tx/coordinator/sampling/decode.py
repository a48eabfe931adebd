"""Builds the Decode command for chosen samples. Pure."""

from collections.abc import Iterable, Iterator

import numpy as np
from msgspec.structs import replace

from spmd_tx.coordinator.grammar.guide import WORD
from spmd_tx.coordinator.sampling.job import Sample
from spmd_tx.coordinator.sampling.programs import DecodeShape
from spmd_tx.coordinator.sampling.speculation.guess import Guess
from spmd_tx.protocol.commands import DRAFT_TOKENS, STOP_TOKENS, Decode

FRESH = -1  # source of a row whose state comes from the coordinator
DRAW = -1  # in place of a token that is not known
# What a follower has of the row that it follows; pages, and the place in a sequence, are found on the device.
OF_FOLLOWERS = "remaining", "slots", "seeds", "temperatures", "top_k", "top_p", "stop_tokens"
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
    pages: list[int] = []  # that come to rows, row after row
    command = Decode(
        steps=steps,
        source=np.full(count, FRESH, np.int32),
        tokens=np.zeros(count, np.int32),
        positions=np.zeros(count, np.int32),
        remaining=np.zeros(count, np.int32),
        slots=np.zeros(count, np.int32),
        seeds=np.zeros((count, 2), np.uint32),
        temperatures=np.ones(count, np.float32),
        top_k=np.full(count, vocab_size, np.int32),
        top_p=np.ones(count, np.float32),
        stop_tokens=np.full((count, STOP_TOKENS), -1, np.int32),
        pages=np.zeros(0, np.int32),
        page_counts=np.zeros(count, np.int32),
        page_places=np.zeros(count, np.int32),
        top=program.top,
        active=program.active,
        block=shape.block,
        forced=np.full((count, shape.known_steps), DRAW, np.int32) if shape.known_steps else None,
        states=np.zeros(count, np.int32) if has_states else None,
        shifts=np.zeros(count, np.int32) if has_images else None,
        mask_places=np.full((count, shape.known_steps), NO_MASK, np.int32) if program.masked else None,
        depths=np.zeros(count, np.int32) if program.speculative else None,
        drafts=np.full((count, DRAFT_TOKENS), NO_DRAFT, np.int32) if program.speculative else None,
    )
    masks = dict[int, tuple[int, np.ndarray]]()  # each with its place; by their ids
    for shard, samples in enumerate(chosen):
        for row, sample in rows_of(samples, shard * rows):
            pages += _fill(command, row, sample, last_decode)
            if program.masked and sample.is_masked:
                _constrain(command, row, sample, masks)
            if sample.guess is not None:
                _follow(command, row, sample.guess)
    command = replace(command, pages=np.asarray(pages, np.int32))
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
    """Let rows behind a row read what is likely to follow."""
    assert command.depths is not None
    assert command.drafts is not None
    command.drafts[leader, : len(guess.drafts)] = guess.drafts
    for depth in range(1, 1 + guess.followers):
        row = leader + depth
        command.depths[row] = depth
        for field in OF_FOLLOWERS:
            getattr(command, field)[row] = getattr(command, field)[leader]


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


def _fill(command: Decode, row: int, sample: Sample, last_decode: int) -> list[int]:
    """Fill in a row; return the pages that come to it."""
    job, placed = sample.job, 0
    if sample.decode == last_decode and not sample.begins_anew:
        command.source[row], placed = sample.row, sample.placed
    else:
        command.tokens[row] = sample.content[sample.next_position]
    command.positions[row] = sample.next_position
    command.remaining[row] = sample.steps_left
    if command.forced is not None and sample.behind:
        fed = sample.tokens[-sample.behind :][: command.steps]
        command.forced[row, : len(fed)] = fed
    command.slots[row] = sample.bank
    if command.states is not None:
        command.states[row] = sample.state
    if command.shifts is not None and job.sight is not None:
        command.shifts[row] = job.sight.shift
    command.seeds[row] = sample.seeds
    command.temperatures[row] = job.temperature
    command.top_k[row] = job.top_k
    command.top_p[row] = job.top_p
    command.stop_tokens[row] = job.rule.device_tokens
    command.page_places[row], command.page_counts[row] = placed, len(sample.pages) - placed
    return sample.pages[placed:]
