"""What a Decode says of masks, as its program takes it."""

import numpy as np

from spmd_tx.protocol.commands import MASKS_OF_ROW
from spmd_tx.worker.programs.calls import masks_of_rows


def test_every_row_gets_its_masks_and_the_steps_in_which_they_count():
    masks = np.array([[10], [11], [12]], np.uint32)
    places = np.array([[-1, 2, 0, 2], [-1, -1, -1, -1], [1, 1, 1, -1]], np.int32)
    fields = masks_of_rows(masks, places)
    assert fields["masks"].shape == (3, MASKS_OF_ROW, 1)
    found = [
        [int(of_row[place, 0]) if place >= 0 else None for place in steps]
        for of_row, steps in zip(fields["masks"], fields["mask_places"], strict=True)
    ]
    assert found == [[None, 12, 10, 12], [None] * 4, [11, 11, 11, None]]
