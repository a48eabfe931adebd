"""Images in datums: their places and rows, however datums are packed and whoever shares the micro-batch."""

from dataclasses import replace

import numpy as np
import pytest

from spmd_tx.coordinator.images.pool import ImagePool
from spmd_tx.coordinator.training.batching import pack
from spmd_tx.coordinator.training.images import check_room, with_room
from spmd_tx.coordinator.training.losses import loss_settings
from spmd_tx.coordinator.training.micro_batch import MicroBatch
from spmd_tx.errors import InvalidRequest
from spmd_tx.images.placed import PlacedImage
from spmd_tx.images.places import places
from tests.coordinator.training.packed_requests import SHAPES, supervised
from tests.support.seen_images import seen, together

VOCABULARY = 5000
LARGE, SMALL = seen("large", 16, 20), seen("small", 16, 16)
SEEN = together([LARGE, SMALL])


def datum(*pieces):
    """A datum of pieces: so many tokens of text, or an image."""
    images, length = [], 0
    for piece in pieces:
        if not isinstance(piece, int):
            images.append(PlacedImage(length, piece.tokens, piece.key.digest))
        length += piece if isinstance(piece, int) else piece.tokens
    made = supervised(length)
    tokens = made.tokens.copy()
    for image in images:
        tokens[image.first : image.end] = 0
    return replace(made, tokens=tokens, images=tuple(images))


DATUMS = [datum(5, LARGE, 9), datum(30), datum(3, SMALL, 4, LARGE, 7), datum(8, SMALL, 2)]


def packed(datums, slot=0, seen=SEEN):
    request = pack(datums, loss_settings("cross_entropy", {}), False, SHAPES, (), seen)
    return replace(request, chunks=[chunk.in_slot(slot) for chunk in request.chunks])


def rows_end_to_end(chunks, field):
    arrays = [getattr(chunk.rows, field) for chunk in chunks]
    return np.concatenate([array.reshape(-1, *array.shape[2:]) for array in arrays])


def test_tokens_of_images_become_rows_of_the_pool_and_all_tokens_have_places():
    request, pool = packed(DATUMS), ImagePool(1000, 2, VOCABULARY)
    chunks = [chunk.seeing(pool.place(chunk.seen).ids) for chunk in request.chunks]
    tokens = rows_end_to_end(chunks, "tokens")[request.destination]
    found = rows_end_to_end(chunks, "places")[request.destination]
    ids, begin = pool.place([LARGE, SMALL]).ids, 0
    for each in DATUMS:
        expected = each.tokens.copy()
        for image in each.images:
            expected[image.first : image.end] = ids[SEEN[image.digest].key]
        end = begin + len(each.tokens)
        assert np.array_equal(tokens[begin:end], expected)
        spans = [SEEN[image.digest].span(image.first) for image in each.images]
        assert np.array_equal(found[begin:end], places(len(each.tokens), spans)[0])
        begin = end


def test_a_chunk_needs_the_programs_that_encode_its_images():
    (chunk,) = packed([DATUMS[0], DATUMS[3]]).chunks
    assert [program.patches for program in chunk.programs if program.step == "encode_images"] == [512, 256]
    (text,) = packed([DATUMS[1]]).chunks
    assert text.programs == [text.program]


def test_models_share_a_micro_batch_with_images_of_each():
    (first,), (second,) = packed([DATUMS[0]], slot=0).chunks, packed([DATUMS[3]], slot=1).chunks
    batch = MicroBatch(first, SHAPES)
    assert batch.join(second)
    pool = ImagePool(1000, 2, VOCABULARY)
    batch.see(pool.place(batch.images).ids)
    tokens = batch.rows().tokens
    for image in (LARGE, SMALL):
        ids = pool.place([image]).ids[image.key]
        assert np.isin(ids, tokens).all()


def test_text_of_a_model_that_sees_has_places_and_of_one_that_does_not_none():
    (chunk,) = packed([DATUMS[1]]).chunks
    used = chunk.rows.segments > 0
    assert np.array_equal(chunk.rows.places[used], np.repeat(chunk.rows.positions[used][:, None], 3, axis=1))
    assert packed([DATUMS[1]], seen=None).chunks[0].rows.places is None


def test_a_row_with_more_images_than_devices_hold_is_refused():
    request = packed(DATUMS)
    check_room(ImagePool(LARGE.tokens + SMALL.tokens, 1, VOCABULARY), request)
    message = r"images of 144 tokens; this server holds 143 at a time\. .* raise --image-tokens"
    with pytest.raises(InvalidRequest, match=message):
        check_room(ImagePool(143, 1, VOCABULARY), request)


def test_a_request_with_more_images_than_devices_hold_is_cut_between_its_rows():
    images = [seen(name) for name in "abcdefgh"]
    datums, pool = [datum(100, each, 90) for each in images], ImagePool(3 * 64 + 1, 1, VOCABULARY)
    whole = with_room(SHAPES, together(images[:3]), pool)
    assert whole is SHAPES, "these find room"
    shapes = with_room(SHAPES, together(images), pool)
    assert (shapes.image_tokens, SHAPES.as_recorded(shapes.layout)) == (193, shapes)
    assert shapes.layout.endswith(" in blocks of 256+2048 with images of 193")
    one, several = (
        pack(datums, loss_settings("cross_entropy", {}), False, each, (), together(images))
        for each in (SHAPES, shapes)
    )
    check_room(pool, several)
    with pytest.raises(InvalidRequest):
        check_room(pool, one)
    assert len(several.chunks) > len(one.chunks)
    for field in ("tokens", "targets", "segments"):
        assert np.array_equal(*(rows_end_to_end(each.chunks, field) for each in (one, several)))
    assert [image.image.key.digest for chunk in several.chunks for image in chunk.images] == [
        image.image.key.digest for chunk in one.chunks for image in chunk.images
    ]
    again = with_room(SHAPES.as_recorded(shapes.layout), together(images), ImagePool(9000, 1, VOCABULARY))
    assert again == shapes, "what ran once is cut as it was, whatever finds room now"
    assert with_room(shapes, together(images), ImagePool(130, 1, VOCABULARY)).image_tokens == 130


def test_an_image_that_rows_share_counts_once():
    datums = [datum(100, LARGE, 90) for _ in range(12)]
    shapes = replace(SHAPES, image_tokens=LARGE.tokens)
    chunks = [
        pack(datums, loss_settings("cross_entropy", {}), False, each, (), SEEN).chunks
        for each in (SHAPES, shapes)
    ]
    assert len(chunks[0]) == len(chunks[1])
