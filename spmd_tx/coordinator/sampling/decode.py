"""Builds the Decode command for chosen samples. Pure."""

from collections.abc import Iterable, Iterator

import numpy as np
from msgspec.structs import replace

from spmd_tx.coordinator.grammar.guide import WORD
from spmd_tx.coordinator.sampling.job import Sample, SampleJob
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
    placed = [place for shard, samples in enumerate(chosen) for place in rows_of(samples, shard * rows)]
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
    _fill(command, placed, last_decode)
    pages = [page for _, sample in placed for page in _new_pages(sample, last_decode)]
    command = replace(command, pages=np.asarray(pages, np.int32))
    masks = dict[int, tuple[int, np.ndarray]]()  # each with its place; by their ids
    for row, sample in placed:
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


def _fill(command: Decode, placed: list[tuple[int, Sample]], last_decode: int) -> None:
    """Fill in the rows of samples, one column after the other."""
    if not placed:
        return
    rows, samples = np.asarray([row for row, _ in placed]), [sample for _, sample in placed]
    _fill_for_jobs(command, rows, samples)
    on_device = [_is_on_device(sample, last_decode) for sample in samples]
    had = [sample.placed if is_there else 0 for sample, is_there in zip(samples, on_device, strict=True)]
    for (row, sample), is_there in zip(placed, on_device, strict=True):
        if not is_there:
            command.tokens[row] = _next_token(sample)
        if command.forced is not None and sample.behind:
            fed = sample.tokens[-sample.behind :][: command.steps]
            command.forced[row, : len(fed)] = fed
    command.source[rows] = np.where(on_device, [sample.row for sample in samples], FRESH)
    command.positions[rows] = [sample.next_position for sample in samples]
    command.remaining[rows] = [sample.steps_left for sample in samples]
    command.slots[rows] = [sample.bank for sample in samples]
    command.seeds[rows] = np.asarray([sample.seeds for sample in samples], np.uint32)
    command.page_places[rows] = had
    command.page_counts[rows] = np.asarray([len(sample.pages) for sample in samples]) - had
    if command.states is not None:
        command.states[rows] = [sample.state for sample in samples]


def _fill_for_jobs(command: Decode, rows: np.ndarray, samples: list[Sample]) -> None:
    """Fill in what all samples of a job have in common."""
    numbers = dict[SampleJob, int]()
    of_row = np.asarray([numbers.setdefault(sample.job, len(numbers)) for sample in samples])
    command.temperatures[rows] = np.asarray([job.temperature for job in numbers], np.float32)[of_row]
    command.top_k[rows] = np.asarray([job.top_k for job in numbers])[of_row]
    command.top_p[rows] = np.asarray([job.top_p for job in numbers], np.float32)[of_row]
    command.stop_tokens[rows] = np.asarray([job.rule.device_tokens for job in numbers])[of_row]
    if command.shifts is not None:
        shifts = [0 if job.sight is None else job.sight.shift for job in numbers]
        command.shifts[rows] = np.asarray(shifts)[of_row]


def _is_on_device(sample: Sample, last_decode: int) -> bool:
    """Whether the last Decode has left the state of a sample's row."""
    return sample.decode == last_decode and not sample.begins_anew


def _next_token(sample: Sample) -> int:
    prompt, position = sample.job.prompt, sample.next_position
    return prompt[position] if position < len(prompt) else sample.tokens[position - len(prompt)]


def _new_pages(sample: Sample, last_decode: int) -> list[int]:
    """Return the pages that come to a sample's row."""
    return sample.pages[sample.placed if _is_on_device(sample, last_decode) else 0 :]
