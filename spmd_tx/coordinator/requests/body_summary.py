"""Summarizes the body of a request in a few lines, whatever it holds. Pure."""

from collections.abc import Iterator
from typing import Any

import msgspec
from google.protobuf.message import DecodeError

from spmd_tx.byte_sizes import show_size
from spmd_tx.coordinator.wire import tinker_pb2 as pb
from spmd_tx.errors import UNREADABLE

MOST_CHARACTERS = 120  # of a text
MOST_ITEMS = 8  # of a list
MOST_FIELDS = 24  # of an object
DEEPEST = 6
BYTES_PER_TOKEN = 4
PROTOBUF_KINDS = ("forward", "forward_backward")


def summary(kind: str, body: bytes) -> list[str]:
    """Some hundred lines at most, without control characters."""
    try:
        if kind in PROTOBUF_KINDS:
            return list(_of_training(pb.ForwardBackwardRequest.FromString(body)))
        return list(_of_object(msgspec.json.decode(body)))
    except (DecodeError, *UNREADABLE, RecursionError) as error:
        return [f"cannot be read ({clean(str(error))}); it begins with {body[:MOST_CHARACTERS]!r}"]


def clean(text: str) -> str:
    """The beginning of a text, as ``repr`` if it is not printable."""
    beginning = text[: MOST_CHARACTERS + 1]
    shown = beginning if beginning.isprintable() else repr(beginning)
    return (
        shown if len(shown) <= MOST_CHARACTERS else f"{shown[:MOST_CHARACTERS]}... ({len(text)} characters)"
    )


def _of_training(message: pb.ForwardBackwardRequest) -> Iterator[str]:
    yield f"loss: {clean(message.loss_fn) or 'none'}"
    yield f"examples: {len(message.data)}"
    chunks = [chunk for datum in message.data for chunk in datum.model_input]
    images = [chunk.image.stored for chunk in chunks if chunk.WhichOneof("chunk") == "image"]
    tokens = sum(len(chunk.encoded_text.tokens) // BYTES_PER_TOKEN for chunk in chunks)
    yield f"tokens: {tokens + sum(image.tokens for image in images)}"
    if images:
        yield f"images: {len(images)}, {show_size(sum(image.size for image in images))}"
    for datum in message.data[:1]:
        for name, tensor in list(datum.loss_fn_inputs.items())[:MOST_FIELDS]:
            encoding = tensor.WhichOneof("encoding") or "empty"
            yield f"input {clean(name)} of the first: {encoding}, shape {_value(list(tensor.shape), 0)}"


def _of_object(value: Any) -> Iterator[str]:
    if not isinstance(value, dict):
        yield _value(value, 0)
        return
    for key, field in list(value.items())[:MOST_FIELDS]:
        yield f"{clean(str(key))}: {_value(field, 0)}"
    if len(value) > MOST_FIELDS:
        yield f"... {len(value) - MOST_FIELDS} more fields"


def _value(value: Any, depth: int) -> str:
    match value:
        case str():
            return clean(value)
        case list() | dict() if depth >= DEEPEST:
            return "..."
        case list():
            more = f", ... {len(value) - MOST_ITEMS} more" if len(value) > MOST_ITEMS else ""
            return f"[{', '.join(_value(each, depth + 1) for each in value[:MOST_ITEMS])}{more}]"
        case dict():
            items = list(value.items())[:MOST_ITEMS]
            shown = ", ".join(f"{clean(str(key))}: {_value(each, depth + 1)}" for key, each in items)
            more = f", ... {len(value) - MOST_ITEMS} more" if len(value) > MOST_ITEMS else ""
            return f"{{{shown}{more}}}"
        case _:
            return clean(str(value))
