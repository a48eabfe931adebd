import json

import numpy as np
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from spmd_tx.errors import InvalidRequest, StartError
from spmd_tx.images.processor import ImageProcessor, read_processor

OF_QWEN = {
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "image_processor_type": "Qwen2VLImageProcessorFast",
}


def test_counts_are_those_of_transformers_for_10_000_sizes():
    theirs = Qwen2VLImageProcessorPil(**OF_QWEN)
    random = np.random.default_rng(0)
    sizes = np.exp(random.uniform(np.log(8), np.log(9000), (10_000, 2))).astype(int)
    sizes[::4] = (sizes[::4] // 16 + 1) * 16  # halves of a token's side
    for height, width in sizes.tolist():
        if max(height, width) <= 200 * min(height, width):
            patches = theirs.get_number_of_image_patches(height, width, {})
            ours = ImageProcessor().resized(height, width)
            assert (ours.tokens * 4, ours.rows * ours.columns) == (patches, patches), (height, width)


@pytest.mark.parametrize(
    "size, resized",
    [
        ((336, 336), (320, 320, 20, 20, 100)),  # halves are rounded to even
        ((17, 16), (288, 256, 18, 16, 72)),
        ((100, 20_000), (96, 20_000, 6, 1250, 1875)),
        ((9000, 9000), (4096, 4096, 256, 256, 16_384)),
    ],
)
def test_a_size_is_made_of_whole_tokens(size, resized):
    assert ImageProcessor().resized(*size) == resized


def test_an_image_far_longer_than_wide_is_refused():
    assert ImageProcessor().resized(10, 2000).tokens
    with pytest.raises(InvalidRequest, match="2001 x 10 pixels: one side is more than 200 times the other"):
        ImageProcessor().resized(10, 2001)


@pytest.mark.parametrize(
    "content",
    [
        OF_QWEN,
        {"image_processor": OF_QWEN, "processor_class": "Qwen3VLProcessor"},
        {key: value for key, value in OF_QWEN.items() if key != "size"}
        | {"min_pixels": 65536, "max_pixels": 16777216},
    ],
    ids=["of images", "of all", "old"],
)
def test_the_files_of_processors_are_read(content):
    assert read_processor(json.dumps(content).encode(), "preprocessor_config.json") == ImageProcessor()


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"image_mean": [0.48, 0.46, 0.41]}, "image_mean"),
        ({"resample": 2}, "resample 2; images are only prepared with 3"),
        ({"patch_size": 14}, "patch_size 14"),
        ({"do_resize": False}, "do_resize False"),
        ({"rescale_factor": 1.0}, "rescale_factor 1.0"),
        ({"size": None}, "neither size nor min_pixels"),
        ({"size": {"shortest_edge": 100, "longest_edge": 10}}, "allows 100 to 10 pixels"),
        ({"size": {"height": 224}}, "cannot be read"),
    ],
)
def test_a_processor_that_would_need_other_pixels_is_refused(change, problem):
    with pytest.raises(StartError, match=problem):
        read_processor(json.dumps(OF_QWEN | change).encode(), "preprocessor_config.json")
