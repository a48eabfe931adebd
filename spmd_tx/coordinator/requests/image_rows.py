"""Stores images as rows, in the transaction of the requests that refer to them: each once for its owner."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import orm, select

from spmd_tx.coordinator.images.prepared import ImageKey
from spmd_tx.coordinator.requests import rows
from spmd_tx.coordinator.requests.records import BodyRef
from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.storage import bulk_rows
from spmd_tx.coordinator.storage.tables import ImageRow, RequestImage, SessionRow

ImageFiles = Mapping[str, bytes]  # of images, by their digests


class NewImages(NamedTuple):
    """Holds the images of some requests."""

    keys: Sequence[Sequence[ImageKey]]  # for each request
    known: Mapping[ImageKey, int]  # numbers of those that are stored
    new: Mapping[ImageKey, bytes]  # files of those that are not


def of(db: orm.Session, requests: Sequence[tuple[str, ImageFiles]]) -> NewImages:
    """Find which images of requests, each with its session, are new."""
    if not any(files for _, files in requests):
        return NewImages([()] * len(requests), {}, {})
    sessions = {session for session, files in requests if files}
    query = select(SessionRow.id, SessionRow.owner).where(SessionRow.id.in_(sessions))
    owners = {row.id: row.owner for row in db.execute(query)}
    keys = [[ImageKey(owners[session], digest) for digest in files] for session, files in requests]
    files = {key: files[key.digest] for each, (_, files) in zip(keys, requests, strict=True) for key in each}
    known = _numbers(db, list(files))
    return NewImages(keys, known, {key: content for key, content in files.items() if key not in known})


def append(db: orm.Session, images: NewImages, places: Iterable[BodyRef], requests: Sequence[int]) -> None:
    """Store new images, whose files are in these places, and which requests (numbers) refer to which."""
    stored = zip(images.new, places, strict=True)
    bulk_rows.insert(db, ImageRow, [_values(key, place) for key, place in stored])
    numbers = {**images.known, **_numbers(db, list(images.new))}
    links = [
        {"request": request, "image": numbers[key]}
        for request, keys in zip(requests, images.keys, strict=True)
        for key in keys
    ]
    bulk_rows.insert(db, RequestImage, links)


def place_of(row: ImageRow) -> BodyRef:
    """Return where the file of an image is."""
    return rows.body_ref(row.content_body, row.content_file, row.content_offset, row.content_length)


def _numbers(db: orm.Session, keys: Sequence[ImageKey]) -> dict[ImageKey, int]:
    columns = *ImageKey._fields, "number"
    found = bulk_rows.find(db, ImageRow, ImageKey._fields, keys, columns)
    return {ImageKey(owner, digest): number for owner, digest, number in found}


def _values(key: ImageKey, place: BodyRef) -> Mapping[str, object]:
    whose = {"owner": key.owner, "digest": key.digest, "created_at": clock.now()}
    return {**whose, **rows.body_values("content", place), "patches": None}
