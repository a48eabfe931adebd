import numpy as np

from spmd_tx.images.places import ImageSpan, places


def test_text_counts_up_on_all_axes():
    found, shift = places(4, [])
    assert found.tolist() == [[0] * 3, [1] * 3, [2] * 3, [3] * 3]
    assert found.dtype == np.int32
    assert shift == 0


def test_an_image_counts_rows_and_columns_and_takes_its_longer_side():
    found, shift = places(9, [ImageSpan(2, 2, 3)])
    assert found[:2].tolist() == [[0] * 3, [1] * 3]
    assert found[2:8].tolist() == [[2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4]]
    assert found[8].tolist() == [5, 5, 5]
    assert shift == -3


def test_a_later_image_begins_behind_the_longer_side_of_the_one_before():
    found, shift = places(4 + 165 + 3 + 70 + 2, [ImageSpan(4, 11, 15), ImageSpan(172, 10, 7)])
    assert found[172].tolist() == [4 + 15 + 3] * 3
    assert found[-1].tolist() == [4 + 15 + 3 + 10 + 1] * 3
    assert shift == (15 - 165) + (10 - 70)
    assert found[-1, 0] == len(found) - 1 + shift
