"""Takes images out of requests as they arrive: counts their tokens and leaves references in place. Pure.

Only headers are read. What cannot be decoded is found later, and fails its request then.
"""

import binascii
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from spmd_tx.byte_sizes import show_size
from spmd_tx.coordinator.conversation.messages import (
    TOOL,
    USER,
    Conversation,
    Message,
    MessageImage,
    shown,
)
from spmd_tx.coordinator.wire import tinker_pb2 as pb
from spmd_tx.coordinator.wire.limits import WHO_SEES, Limits
from spmd_tx.coordinator.wire.sampling import ImageRef, ModelInput, ModelInputChunk
from spmd_tx.coordinator.wire.training_protobuf import MAX_IMAGE_TOKENS, TOO_MANY_IMAGE_TOKENS
from spmd_tx.errors import InvalidRequest
from spmd_tx.images.headers import read_header

DIGEST_BYTES = 16


class TakenPrompt(NamedTuple):
    """Holds a prompt with references, and the files that they stand for, by digest."""

    prompt: ModelInput
    files: Mapping[str, bytes]


class TakenConversation(NamedTuple):
    """Holds a conversation with references, these in their order, and the files, by digest."""

    conversation: Conversation
    images: Sequence[ImageRef]
    files: Mapping[str, bytes]


class TakenBody(NamedTuple):
    """Holds a training body with references, and the files that they stand for, by digest."""

    body: bytes
    files: Mapping[str, bytes]


def of_prompt(prompt: ModelInput, limits: Limits) -> TakenPrompt:
    """Take the images out of a prompt. Raises InvalidRequest; other wrong chunks are left for the check."""
    kinds = [chunk.kind for chunk in prompt.chunks]
    if limits.images is None or not {"image", "stored_image"} & {*kinds}:
        return TakenPrompt(prompt, {})
    most, count = limits.bounds.images, kinds.count("image")
    if count > most:
        raise _too_many("prompt", count, most)
    files, chunks = dict[str, bytes](), list[ModelInputChunk]()
    for place, (chunk, kind) in enumerate(zip(prompt.chunks, kinds, strict=True)):
        if kind == "stored_image":
            raise InvalidRequest(f"chunk {place} of the prompt has 'stored', which clients do not send")
        if kind == "image":
            what = f"chunk {place} of the prompt"
            content, stored = _of_base64(what, chunk.data or "", limits, chunk.expected_tokens)
            files[stored.digest] = content
            chunk = ModelInputChunk(stored=stored)
        chunks.append(chunk)
    return TakenPrompt(ModelInput(chunks), files)


def of_conversation(conversation: Conversation, limits: Limits) -> TakenConversation:
    """Take the images out of a conversation. Raises InvalidRequest."""
    count = sum(len(message.images) for message in conversation.messages)
    if not count:
        return TakenConversation(conversation, (), {})
    _check_conversation(conversation, count, limits)
    refs, files, messages = list[ImageRef](), dict[str, bytes](), list[Message]()
    for message in conversation.messages:
        images = list[MessageImage]()
        for image in message.images:
            what = f"image {len(refs)} of the conversation"
            content, stored = _of_base64(what, image.data, limits)
            refs.append(stored)
            files[stored.digest] = content
            images.append(replace(image, digest=stored.digest, tokens=stored.tokens))
        messages.append(replace(message, images=tuple(images)))
    return TakenConversation(replace(conversation, messages=tuple(messages)), tuple(refs), files)


def _check_conversation(conversation: Conversation, count: int, limits: Limits) -> None:
    if limits.images is None:
        raise InvalidRequest(
            f"the conversation has an image, and this model takes text alone; leave it out {WHO_SEES}"
        )
    if count > limits.bounds.images:
        raise _too_many("conversation", count, limits.bounds.images)
    for message in conversation.messages:
        if message.images and message.role not in (USER, TOOL):
            raise InvalidRequest(
                f"a message of the role {shown(message.role)} has an image; send it in a message of the user"
            )


def of_training(body: bytes, limits: Limits) -> TakenBody:
    """Take the images out of a forward_backward body that parses. What is wrong with one is said in it."""
    message = pb.ForwardBackwardRequest.FromString(body)
    files, left = dict[str, bytes](), MAX_IMAGE_TOKENS
    images = [
        chunk.image
        for datum in message.data
        for chunk in datum.model_input
        if chunk.WhichOneof("chunk") == "image"
    ]
    if not images:
        return TakenBody(body, {})
    for image in images:
        try:
            stored = _of_message(image, limits)
            left -= stored.tokens
            if left < 0:
                raise InvalidRequest(TOO_MANY_IMAGE_TOKENS)
        except InvalidRequest as problem:
            image.CopyFrom(pb.ImageChunk(stored=pb.StoredImage(problem=str(problem))))
            continue
        files[stored.digest] = image.data
        image.CopyFrom(pb.ImageChunk(stored=pb.StoredImage(**msgspec.structs.asdict(stored))))
    return TakenBody(message.SerializeToString(deterministic=True), files)


def reference(content: bytes, limits: Limits, expected_tokens: int | None = None) -> ImageRef:
    """Return what stands for an image in the log. Raises InvalidRequest if it cannot be taken."""
    if limits.images is None:
        raise InvalidRequest("this model takes text alone")
    bounds, size = limits.bounds, len(content)
    if size > bounds.image_bytes:
        raise _too_large(show_size(size), show_size(bounds.image_bytes), "image_bytes")
    header = read_header(content)
    pixels = header.width * header.height
    if pixels > bounds.image_pixels:
        raise _too_large(
            f"{header.width} x {header.height} = {pixels} pixels", str(bounds.image_pixels), "image_pixels"
        )
    resized = limits.images.resized(header.height, header.width)
    if resized.tokens > bounds.image_tokens_each:
        raise _too_large(f"{resized.tokens} tokens", str(bounds.image_tokens_each), "image_tokens_each")
    if expected_tokens not in (None, resized.tokens):
        raise InvalidRequest(
            f"expected_tokens is {expected_tokens} and the image has {resized.tokens}: its "
            f"{header.width} x {header.height} pixels are resized to {resized.width} x {resized.height}; "
            "count with the processor of this model, or leave expected_tokens out"
        )
    return ImageRef(
        blake2b(content, digest_size=DIGEST_BYTES).hexdigest(),
        resized.tokens,
        header.width,
        header.height,
        size,
    )


def _of_message(image: pb.ImageChunk, limits: Limits) -> ImageRef:
    if image.HasField("override_dimensions"):
        raise InvalidRequest("override_dimensions is not offered; resize the image before you send it")
    expected = image.expected_tokens if image.HasField("expected_tokens") else None
    return reference(image.data, limits, expected)


def _of_base64(
    what: str, text: str, limits: Limits, expected_tokens: int | None = None
) -> tuple[bytes, ImageRef]:
    """Return the file of an image, and what stands for it. ``what`` is the image, for messages."""
    most = limits.bounds.image_bytes
    try:
        if len(text) > 4 * (most // 3 + 1):
            raise _too_large(f"{show_size(3 * len(text) // 4)} or so", show_size(most), "image_bytes")
        content = binascii.a2b_base64(text, strict_mode=True)
        return content, reference(content, limits, expected_tokens)
    except InvalidRequest as problem:
        raise InvalidRequest(f"{what}: {problem}") from None
    except ValueError as problem:
        raise InvalidRequest(f"{what}: data is not base64 ({problem}); send the file in base64") from None


def _too_many(what: str, count: int, most: int) -> InvalidRequest:
    return InvalidRequest(
        f"the {what} has {count} images; at most {most} are allowed (the operator raises the limit images)"
    )


def _too_large(size: str, most: str, limit: str) -> InvalidRequest:
    return InvalidRequest(
        f"the image has {size}; at most {most} are allowed, so send a smaller one (the operator raises the "
        f"limit {limit})"
    )
