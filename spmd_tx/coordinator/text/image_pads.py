"""Finds the places of images in the tokens of a prompt. Pure; raises InvalidRequest.

A chat template writes one pad for each image, which then becomes as many pads as the image has tokens.
"""

from collections.abc import Sequence

from spmd_tx.coordinator.wire.sampling import ImageRef, ModelInput, ModelInputChunk
from spmd_tx.errors import InvalidRequest

PAD = "<|image_pad|>"


def widened(tokens: Sequence[int], pad: int, counts: Sequence[int]) -> list[int]:
    """Return the tokens with so many pads in the place of each one."""
    if (found := list(tokens).count(pad)) != len(counts):
        raise InvalidRequest(
            f"the prompt has {len(counts)} images and {PAD} {found} times; leave {PAD} out of the texts of a "
            "conversation with images"
        )
    left, wide = iter(counts), list[int]()
    for token in tokens:
        wide += [pad] * next(left) if token == pad else [token]
    return wide


def with_images(tokens: Sequence[int], pad: int, images: Sequence[ImageRef]) -> ModelInput:
    """Return the prompt with the images in the places of their pads."""
    chunks, at, tokens = list[ModelInputChunk](), 0, list(tokens)
    for image in images:
        begin = tokens.index(pad, at) if pad in tokens[at:] else len(tokens)
        end = begin + image.tokens
        if tokens[begin:end] != [pad] * image.tokens:
            raise InvalidRequest(
                f"the conversation has {PAD} in a text, so that the places of its images are not known; "
                "leave it out"
            )
        chunks += [ModelInputChunk(tokens=tokens[at:begin]), ModelInputChunk(stored=image)]
        at = end
    return ModelInput([*chunks, ModelInputChunk(tokens=tokens[at:])])
