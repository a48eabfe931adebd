import numpy as np

from spmd_tx.coordinator.runtime.metrics import REGISTRY
from spmd_tx.coordinator.scheduler.command_metrics import count_images
from spmd_tx.protocol.commands import EncodeImages
from tests.support import moves


def encoded():
    return REGISTRY.get_sample_value("spmd_tx_images_encoded_total", {"group": "main"}) or 0


def test_each_image_of_a_command_that_encodes_counts():
    before = encoded()
    count_images(
        EncodeImages(
            patches=np.zeros((3, 4, 768), np.uint8),
            grids=np.ones((3, 2), np.int32),
            rows=np.zeros((3, 1), np.int32),
        )
    )
    count_images(moves.create_adapter(0, 5))
    assert encoded() == before + 3
