"""Reads what requests of all dialects have in common: texts, and descriptions of functions. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from spmd_tx.coordinator.conversation.messages import Fields, MessageImage, Tool, shown
from spmd_tx.errors import WrongField


def text_of(place: str, fields: Fields, key: str) -> str:
    """Return the text of a field. Raises WrongField."""
    value = fields.get(key)
    if not isinstance(value, str):
        raise WrongField(f"{place}.{key} is {shown(value)}; send a text", f"{place}.{key}")
    return value


class ImageData(NamedTuple):
    """Holds the file of an image."""

    base64: str


class JoinedContent(NamedTuple):
    """Holds a text, and the images in it."""

    text: str
    images: tuple[MessageImage, ...] = ()


def joined(parts: Sequence[str | ImageData], between: str) -> JoinedContent:
    """Join parts; ``between`` stands between two texts."""
    text, images, follows_text = "", list[MessageImage](), False
    for part in parts:
        if isinstance(part, str):
            text += between + part if follows_text else part
        else:
            images.append(MessageImage(len(text), part.base64))
        follows_text = isinstance(part, str)
    return JoinedContent(text, tuple(images))


def image_of_url(place: str, url: Any) -> ImageData:
    """Return the image of a data URI. Raises WrongField: images are never fetched."""
    head, _, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    if not (head.startswith("data:") and head.endswith(";base64")):
        raise WrongField(
            f"{place} is {shown(url)}; images are never fetched, so send a PNG or JPEG as a data URI: "
            "data:image/png;base64,...",
            place,
        )
    return ImageData(data)


def refuse(place: str, unknown: Iterable[str]) -> None:
    """Raise WrongField for the first of some fields, if there are any."""
    for name in unknown:
        raise WrongField(f"{place}.{name} is not known to this server; leave it out", f"{place}.{name}")


def function_of(place: str, fields: Fields, schema_key: str = "parameters", param: str | None = None) -> Tool:
    """Read a function. ``param`` is what errors name; None: ``place`` itself, or its schema."""
    name, description = fields.get("name"), fields.get("description") or ""
    schema = fields.get(schema_key) or {"type": "object", "properties": {}}
    if not (isinstance(name, str) and name and isinstance(description, str)):
        raise WrongField(
            f"{place} has the name {shown(name)} and the description {shown(description)}; send texts",
            param or place,
        )
    if not isinstance(schema, dict):
        wrong = f"{place}.{schema_key}"
        raise WrongField(f"{wrong} is {shown(schema)}; send a JSON schema", param or wrong)
    return Tool(name, description, schema)
