"""Commands read a prompt's images and places as transformers has them, wherever the prompt is cut."""

import numpy as np
import pytest

from spmd_tx.coordinator.sampling.request.prompt_images import PromptImages
from spmd_tx.images.placed import PlacedImage
from tests.golden.vision_cases import NUMBERS, PROMPT, count
from tests.support.seen_images import seen, together

PLACES = np.load(NUMBERS)["qwen3_vl/places"]


@pytest.fixture
def prompt():
    placed, images, first = [], [], 0
    for piece in PROMPT:
        if not isinstance(piece, int):
            images.append(seen(f"at {first}", *piece))
            placed.append(PlacedImage(first, count(piece), f"at {first}"))
        first += count(piece)
    return PromptImages(placed, together(images))


@pytest.mark.parametrize("first, end", [(0, 256), (0, 5), (3, 40), (100, 180), (172, 175), (250, 256)])
def test_places_are_those_of_transformers(prompt, first, end):
    assert np.array_equal(prompt.places(first, end), PLACES[first:end])


def test_what_is_drawn_goes_on_behind_the_images(prompt):
    assert prompt.shift == PLACES[-1, 0] - 255
    assert np.array_equal(prompt.places(254, 258)[:, 1], PLACES[-1, 0] + np.arange(-1, 3))
    assert np.array_equal(prompt.places(300, 302), np.array([[300] * 3, [301] * 3]) + prompt.shift)


@pytest.mark.parametrize(
    "first, end, names",
    [
        (0, 5, []),
        (0, 6, ["at 5"]),
        (169, 170, ["at 5"]),
        (170, 177, []),
        (160, 178, ["at 5", "at 177"]),
        (250, 256, []),
    ],
)
def test_a_chunk_reads_the_images_that_it_has_tokens_of(prompt, first, end, names):
    assert [image.key.digest for image in prompt.within(first, end)] == names


@pytest.mark.parametrize("first, end", [(0, 256), (0, 3), (100, 171), (169, 180), (240, 256)])
def test_ids_go_where_tokens_of_images_are(prompt, first, end):
    whole = np.arange(256)
    ids = {
        image.key: 1000 * (1 + place) + np.arange(image.tokens)
        for place, image in enumerate(prompt.within(0, 256))
    }
    expected = whole.copy()
    expected[5:170], expected[177:247] = 1000 + np.arange(165), 2000 + np.arange(70)
    tokens = whole[first:end].copy()
    prompt.fill(tokens, first, ids)
    assert np.array_equal(tokens, expected[first:end])
