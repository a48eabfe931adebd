"""An engine of a tiny model that sees, driven by commands as the coordinator sends them."""

from pathlib import Path
from typing import Any

import numpy as np

from spmd_tx.protocol import commands
from spmd_tx.protocol.commands import EncodeImages, Prefill, padded_patches
from spmd_tx.worker.engine import Engine
from spmd_tx.worker.programs.compiled import Programs
from tests.golden import vision_cases
from tests.golden.vision_cases import PROMPT, VOCABULARY, is_image, patches, text
from tests.support.tiny_setup import tiny_setup

POOL = 320  # rows
PAGE_SIZE, PART = 8, 64  # tokens
STEPS = 8  # of a Decode
PAGES = np.arange(1, 37, dtype=np.int32)  # for the prompt and a greedy text
SLOT = 1  # of states
FIRST = 64  # the pool's row in which the first image of the prompt begins


def start(
    path: Path, name: str, mesh: tuple[int, int, int], image_tokens: int = POOL, **options: Any
) -> Engine:
    """Write a model, and start an engine for it, whose training slot 0 has no adapter."""
    setup = tiny_setup(
        model_dir=str(vision_cases.write(path, name)),
        **dict(zip(("fsdp", "ep", "tp"), mesh, strict=True)),
        max_rank=2,
        max_context=len(PAGES) * PAGE_SIZE,
        page_size=PAGE_SIZE,
        kv_cache_tokens=2 * len(PAGES) * PAGE_SIZE,
        decode_steps=STEPS,
        image_tokens=image_tokens,
        compilation_cache="",
        **options,
    )
    return Engine.start(setup, Programs(lambda what: None), lambda what: None)


def encode(engine: Engine, grids: list[tuple[int, int]], first: int = FIRST) -> None:
    """Encode images into rows that follow each other. All are padded alike."""
    (size,) = {padded_patches(rows * columns) for rows, columns in grids}
    images, places = (
        np.zeros((len(grids), size, 768), np.uint8),
        np.full((len(grids), size // 4), -1, np.int32),
    )
    for number, grid in enumerate(grids):
        count = grid[0] * grid[1]
        images[number, :count] = patches(grid)
        places[number, : count // 4] = first + np.arange(count // 4)
        first += count // 4
    engine.execute(EncodeImages(patches=images, grids=np.array(grids, np.int32), rows=places))


def encode_prompt(engine: Engine) -> None:
    """Encode the images of the prompt, each with a command of its own."""
    first = FIRST
    for piece in PROMPT:
        if not isinstance(piece, int):
            encode(engine, [piece], first)
            first += piece[0] * piece[1] // 4


def pool(engine: Engine) -> np.ndarray:
    """Return the pool [P, S, D]."""
    return np.asarray(engine.state.base.images)


def prompt() -> np.ndarray:
    """Return the prompt's ids, those of images as rows of the pool."""
    tokens = text()
    tokens[is_image()] = VOCABULARY + FIRST + np.arange(is_image().sum())
    return tokens


def places(name: str) -> np.ndarray:
    return np.load(vision_cases.NUMBERS)[f"{name}/places"]


def _rows(engine: Engine, tokens: np.ndarray, start: int, where: np.ndarray | None, length: int) -> Any:
    """Return tokens and what follows them as a row of the last data shard."""
    shape = (engine.setup.fsdp * engine.setup.ep, length)
    batch = np.zeros((4, *shape), np.int32)
    following = np.append(tokens[1:], 0)
    following[following >= VOCABULARY] = 0
    count = len(tokens)
    batch[:, -1, :count] = tokens, following, np.ones(count), start + np.arange(count)
    all_places = None
    if where is not None:
        all_places = np.zeros((*shape, 3), np.int32)
        all_places[-1, :count] = where
    slots, (tokens, targets, segments, positions) = np.zeros(shape[0], np.int32), batch
    named = {"tokens": tokens, "targets": targets, "segments": segments, "positions": positions}
    return commands.PackedRows(**named, slots=slots, places=all_places)


def loss(rows: commands.PackedRows, first: int = 0) -> commands.LossInputs:
    """Return a cross-entropy of all targets that are text, from the one of the ``first`` token on."""
    by_row, by_token = np.zeros(len(rows.slots), np.float32), np.zeros(rows.tokens.shape, np.float32)
    weights = ((rows.segments > 0) & (rows.targets > 0)).astype(np.float32)
    weights[:, :first] = 0
    return commands.LossInputs(
        kinds=np.zeros(len(rows.slots), np.int32),
        clip_low=by_token,
        clip_high=by_token,
        beta=by_row,
        kl_coeff=by_row,
        weights=weights,
        advantages=by_token,
        sampling_logprobs=by_token,
    )


def row_of(engine: Engine, tokens: np.ndarray, where: np.ndarray | None) -> commands.PackedRows:
    """Return a row of training."""
    return _rows(engine, tokens, 0, where, len(tokens))


def forward(engine: Engine, tokens: np.ndarray, where: np.ndarray | None) -> np.ndarray:
    """Return the log-probability that each token's follower has, in nats."""
    rows = row_of(engine, tokens, where)
    return np.asarray(engine.execute(commands.Forward(rows=rows, loss=loss(rows)))[0]["logprobs"])[-1]


def prefill(
    engine: Engine, tokens: np.ndarray, where: np.ndarray, part: int = PART, slot: int = 0
) -> np.ndarray:
    """Read all tokens but the last, in parts; return the log-probabilities of their followers.

    ``slot`` is the version's, in the bank.
    """
    found, shards = [], engine.setup.fsdp * engine.setup.ep
    for begin in range(0, len(tokens) - 1, part):
        end = min(begin + part, len(tokens) - 1)
        row = _rows(engine, tokens[begin : end + 1], begin, where[begin : end + 1], part + 1)
        row = commands.PackedRows(
            **{
                field: getattr(row, field)[:, :part]
                for field in ("tokens", "targets", "segments", "positions", "places")
            },
            slots=row.slots + slot,
        )
        row.segments[-1, end - begin :] = 0
        pages = np.where(row.segments > 0, PAGES[row.positions // PAGE_SIZE], 0).astype(np.int32)
        tables = np.zeros((shards, len(PAGES)), np.int32)
        tables[-1] = PAGES
        command = Prefill(
            rows=row,
            pages=pages,
            copies=np.zeros((shards, 2), np.int32),
            logprobs=True,
            tables=tables,
            states=_states(engine, shards, begin > 0),
        )
        arrays, _ = engine.execute(command)
        found.append(np.asarray(arrays["logprobs"])[-1, : end - begin])
    return np.concatenate(found)


def _states(engine: Engine, shards: int, goes_on: bool) -> commands.PrefillStates | None:
    if not engine.model.linear_heads:
        return None
    targets = np.zeros(shards, np.int32)
    targets[-1] = SLOT
    nothing = np.zeros((shards, 2), np.int32)
    copies = {"page_copies": nothing, "copies_before": nothing, "copies_after": nothing}
    return commands.PrefillStates(sources=targets * goes_on, targets=targets, **copies)


def decode(engine: Engine, token: int, position: int, shift: int, count: int) -> tuple[list[int], np.ndarray]:
    """Draw greedily after a prompt; return the tokens and their log-probabilities."""
    shards = engine.setup.fsdp * engine.setup.ep

    def last(value: int, rest: int = 0) -> np.ndarray:
        return np.array([rest] * (shards - 1) + [value], np.int32)

    tokens, logprobs = [], []
    for begin in range(0, count, STEPS):
        is_first = begin == 0
        command = commands.Decode(
            steps=STEPS,
            source=last(-1 if is_first else 0, -1),
            tokens=last(token),
            positions=last(position),
            remaining=last(count),
            slots=last(0),
            seeds=np.zeros((shards, 2), np.uint32),
            temperatures=np.zeros(shards, np.float32),
            top_k=np.full(shards, VOCABULARY, np.int32),
            top_p=np.ones(shards, np.float32),
            stop_tokens=np.full((shards, commands.STOP_TOKENS), -1, np.int32),
            pages=PAGES if is_first else PAGES[:0],
            page_counts=last(len(PAGES) if is_first else 0),
            page_places=last(0 if is_first else len(PAGES)),
            states=last(SLOT) if engine.model.linear_heads else None,
            shifts=last(shift),
        )
        arrays, _ = engine.execute(command)
        tokens += np.asarray(arrays["tokens"])[:, -1].tolist()
        logprobs.append(np.asarray(arrays["logprobs"])[:, -1])
    return tokens, np.concatenate(logprobs)
