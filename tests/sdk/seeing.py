"""Tiny models that see, prompts and data with images; servers with these options share compiled programs."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tinker
from tinker import types

from spmd_tx.demo import tiny_model
from tests.sdk.examples import CONTEXT, SECONDS, VOCABULARY, random_tokens
from tests.sdk.server import QUICKLY
from tests.support.pictures import jpeg, png

OPTIONS = {"tensor_parallel_size": 2, "image_tokens": 1024, "environment": QUICKLY}

SQUARE, WIDE = png(256, 256, seed=1), jpeg(200, 420, seed=2)
TOKENS = {SQUARE: 64, WIDE: 78}  # 256 x 256 pixels, and 192 x 416


def write_model(path: Path, family: str = "qwen3_vl") -> Path:
    spec = tiny_model.Spec(family=family, sees=True, vocab_size=VOCABULARY, max_positions=CONTEXT)
    return tiny_model.write(path, spec)


def text(length: int, seed: int) -> types.EncodedTextChunk:
    return types.EncodedTextChunk(tokens=random_tokens(length, seed))


def image(data: bytes, tokens: int | None = None) -> types.ImageChunk:
    """Return an image; ``tokens`` None: of one of the two pictures above."""
    kind = "png" if data.startswith(b"\x89PNG") else "jpeg"
    return types.ImageChunk(
        data=data, format=kind, expected_tokens=TOKENS[data] if tokens is None else tokens
    )


def square(seed: int) -> types.ImageChunk:
    """Return an image of 64 tokens."""
    return image(png(256, 256, seed=seed), 64)


PROMPT = [text(7, 1), image(SQUARE), text(5, 2), image(WIDE), text(9, 3)]


def ids(chunks: Sequence[types.ModelInputChunk]) -> list[int]:
    """Return the tokens, with 0 for those of images."""
    return [t for chunk in chunks for t in getattr(chunk, "tokens", None) or [0] * chunk.length]


def is_image(chunks: Sequence[types.ModelInputChunk]) -> np.ndarray:
    """Return which tokens are those of images."""
    return np.concatenate([np.full(chunk.length, isinstance(chunk, types.ImageChunk)) for chunk in chunks])


def followed(chunks: Sequence[types.ModelInputChunk], tokens: Sequence[int]) -> list[types.ModelInputChunk]:
    """Return a prompt, which ends with text, with more tokens behind it."""
    *before, last = chunks
    return [*before, types.EncodedTextChunk(tokens=[*last.tokens, *tokens])]  # pyright: ignore[reportAttributeAccessIssue]


def datum(chunks: Sequence[types.ModelInputChunk], **inputs: object) -> types.Datum:
    """Make a datum in which every token is predicted; targets of images are 0. Without inputs, all count."""
    *before, last = chunks
    read = [*before, types.EncodedTextChunk(tokens=last.tokens[:-1])]  # pyright: ignore[reportAttributeAccessIssue]
    targets = ids(chunks)[1:]
    fields = {"target_tokens": targets, **(inputs or {"weights": [1.0] * len(targets)})}
    return types.Datum(model_input=types.ModelInput(chunks=read), loss_fn_inputs=fields)  # pyright: ignore[reportArgumentType]


def logprobs(trainer: tinker.TrainingClient, chunks: Sequence[types.ModelInputChunk]) -> np.ndarray:
    output = trainer.forward([datum(chunks)], "cross_entropy").result(SECONDS)
    return output.loss_fn_outputs[0]["logprobs"].to_numpy()
