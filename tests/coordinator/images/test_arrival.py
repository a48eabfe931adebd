import base64

import pytest

from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.images.arrival import of_prompt, of_training
from spmd_tx.coordinator.sampling.request.validation import check_sample
from spmd_tx.coordinator.wire import tinker_pb2 as pb
from spmd_tx.coordinator.wire.limits import Limits
from spmd_tx.coordinator.wire.sampling import ImageRef, ModelInput, ModelInputChunk, SampleRequest
from spmd_tx.coordinator.wire.training_protobuf import decode_forward_backward
from spmd_tx.errors import InvalidRequest
from spmd_tx.images.placed import PlacedImage, image_ids
from spmd_tx.images.processor import ImageProcessor
from tests.support.pictures import jpeg, png

LIMITS = Limits(100, 512, 4, images=ImageProcessor())
TEXT = Limits(100, 512, 4)
PNG, JPEG = png(256, 320), jpeg(256, 256)  # 80 and 64 tokens


def image(content, **fields):
    return ModelInputChunk(data=base64.b64encode(content).decode(), **fields)


def text(*tokens):
    return ModelInputChunk(tokens=list(tokens))


def prompt(*chunks):
    return of_prompt(ModelInput(list(chunks)), LIMITS)


def check(*chunks, limits=LIMITS, **fields):
    check_sample(SampleRequest(of_prompt(ModelInput(list(chunks)), limits).prompt, **fields), limits)


def training(*chunks, limits=LIMITS):
    """Send one datum with these chunks, and read what the log has of it."""
    message = pb.ForwardBackwardRequest(loss_fn="cross_entropy", data=[pb.Datum(model_input=chunks)])
    taken = of_training(message.SerializeToString(), limits)
    (datum,) = decode_forward_backward(taken.body).data
    return taken, datum


def test_a_prompt_keeps_references_and_counts_their_tokens():
    taken, files = prompt(
        text(1, 2), image(PNG, expected_tokens=80, format="png"), text(3), image(JPEG), text(4)
    )
    assert [chunk.length for chunk in taken.chunks] == [2, 80, 1, 64, 1]
    assert taken.length == 148
    first, second = taken.images
    assert (first.first, first.tokens, second.first, second.tokens) == (2, 80, 83, 64)
    assert files == {first.digest: PNG, second.digest: JPEG}
    assert taken.chunks[1].stored == ImageRef(first.digest, 80, 320, 256, len(PNG))
    ids = taken.token_ids
    assert ids[:2] == [1, 2]
    assert ids[2:82] == image_ids(first.digest, 80).tolist()
    assert ids[-1] == 4


def test_equal_images_have_equal_ids_and_others_have_others():
    same = [image_ids(prompt(image(PNG), text(1)).prompt.images[0].digest, 80) for _ in range(2)]
    assert (same[0] == same[1]).all()
    other = image_ids(prompt(image(JPEG), text(1)).prompt.images[0].digest, 80)
    assert not {*same[0].tolist()} & {*other.tolist()}
    assert len({*same[0].tolist()}) == 80
    assert max(same[0].max(), other.max()) <= -2


@pytest.mark.parametrize(
    "chunk, problem",
    [
        (image(b"GIF89a..."), "chunk 1 of the prompt: a GIF; send a PNG or JPEG"),
        (ModelInputChunk(data="?"), "chunk 1 of the prompt: data is not base64"),
        (
            image(png(336, 336), expected_tokens=121),
            "expected_tokens is 121 and the image has 100: its 336 x 336 pixels are resized to 320 x 320; "
            "count with the processor",
        ),
        (image(png(10, 3000)), "3000 x 10 pixels: one side is more than 200 times"),
        (ModelInputChunk(location="https://example.com/a.png", format="png"), "images are never fetched"),
        (ModelInputChunk(dmel="aGk="), "text and images, and no audio"),
        (ModelInputChunk(tokens=[1], data="aGk="), "image chunks with data, and nothing else in them"),
        (ModelInputChunk(stored=ImageRef("00", 64, 1, 1, 1)), "'stored', which clients do not send"),
        (text(100), "the prompt has the token ID 100"),
        (text(-5), "the prompt has the token ID -5"),
    ],
)
def test_a_chunk_that_cannot_be_taken_is_refused_with_the_remedy(chunk, problem):
    with pytest.raises(InvalidRequest, match=problem):
        check(text(1), chunk, text(2))


def test_a_prompt_ends_with_text():
    check(image(PNG), text(1))
    for end in [], [text()]:
        with pytest.raises(
            InvalidRequest, match="ends with an image; send at least one token of text behind"
        ):
            check(text(1), image(PNG), *end)


def test_the_context_bounds_images_too():
    with pytest.raises(InvalidRequest, match="it has 641 tokens and the context holds 512"):
        check(*[image(PNG)] * 8, text(1))


@pytest.mark.parametrize(
    "name, last, problem",
    [
        ("images", 2, "the prompt has 2 images; at most 1 are allowed"),
        ("image_bytes", len(PNG), r"KiB; at most .* are allowed, so send a smaller one .* limit image_bytes"),
        ("image_pixels", 320 * 256, "320 x 256 = 81920 pixels; at most 81919 are allowed"),
        ("image_tokens_each", 80, "80 tokens; at most 79 are allowed"),
    ],
)
def test_each_limit_takes_the_last_value_and_refuses_the_next(name, last, problem):
    chunks = ModelInput([image(PNG), image(PNG), text(1)])
    of_prompt(chunks, Limits(100, 512, 4, Bounds(**{name: last}), ImageProcessor()))
    with pytest.raises(InvalidRequest, match=problem):
        of_prompt(chunks, Limits(100, 512, 4, Bounds(**{name: last - 1}), ImageProcessor()))


@pytest.mark.parametrize("chunk", [image(PNG), ModelInputChunk(stored=ImageRef("00", 64, 1, 1, 1))])
def test_a_model_that_takes_text_alone_refuses_images(chunk):
    with pytest.raises(InvalidRequest, match="this model takes text, so send encoded_text chunks only"):
        check(text(1), chunk, text(2), limits=TEXT)


def of_text(*tokens):
    return pb.Chunk(
        encoded_text=pb.EncodedTextChunk(tokens=b"".join(each.to_bytes(4, "little") for each in tokens))
    )


def of_image(content, **fields):
    return pb.Chunk(image=pb.ImageChunk(data=content, format="png", **fields))


def test_a_training_body_keeps_references_and_zeros_in_their_places():
    taken, datum = training(of_text(5, 6), of_image(PNG, expected_tokens=80), of_text(7))
    assert datum.problem is None
    assert datum.tokens.tolist() == [5, 6, *[0] * 80, 7]
    (placed,) = datum.images
    assert placed == PlacedImage(2, 80, placed.digest)
    assert taken.files == {placed.digest: PNG}
    assert PNG not in taken.body


def test_sixteen_datums_with_one_image_take_it_once():
    data = [pb.Datum(model_input=[of_text(1), of_image(PNG), of_text(number)]) for number in range(16)]
    taken = of_training(pb.ForwardBackwardRequest(data=data).SerializeToString(), LIMITS)
    assert list(taken.files.values()) == [PNG]
    assert len(taken.body) < 16 * 100


@pytest.mark.parametrize(
    "chunk, problem",
    [
        (of_image(b"hello"), "an image of its model_input cannot be used: neither PNG nor JPEG"),
        (of_image(PNG, expected_tokens=81), "expected_tokens is 81 and the image has 80"),
        (of_image(PNG, expected_tokens=0), "expected_tokens is 0 and the image has 80"),
        (
            of_image(PNG, override_dimensions=pb.ImageDimensions(width=1)),
            "override_dimensions is not offered",
        ),
        (pb.Chunk(dmel=pb.DmelChunk(dmel=b"a")), "a chunk of kind 'dmel'"),
        (pb.Chunk(), "a chunk of kind 'unknown'; send .* images are never fetched"),
    ],
)
def test_a_datum_says_what_is_wrong_with_its_image(chunk, problem):
    taken, datum = training(of_text(1), chunk, of_text(2), limits=LIMITS)
    assert not taken.files
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(datum.problem)


def test_a_client_cannot_name_an_image_of_the_log():
    forged = pb.StoredImage(digest="00", tokens=64)
    taken, datum = training(of_text(1), pb.Chunk(image=pb.ImageChunk(stored=forged)), of_text(2))
    assert "no bytes at all" in (datum.problem or "")
    assert not taken.files


def test_small_headers_cannot_claim_millions_of_tokens():
    claim = png(64, 64)[:16] + (4096).to_bytes(4) * 2
    data = [pb.Datum(model_input=[of_image(claim)]) for _ in range(300)]
    taken = of_training(pb.ForwardBackwardRequest(data=data).SerializeToString(), LIMITS)
    read = decode_forward_backward(taken.body).data
    assert sum(len(datum.tokens) for datum in read) == 1 << 22
    assert "more than 4194304 tokens; send fewer datums" in (read[-1].problem or "")
