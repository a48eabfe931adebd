import numpy as np
import pytest

from spmd_tx.coordinator.grammar.likely_masks import REMEMBERED, LikelyMasks
from spmd_tx.protocol.commands import MASKS_OF_ROW


def mask(number):
    return np.array([number, 0], np.uint32)


def numbers(masks):
    return [int(each[0]) for each in masks]


def test_what_is_not_known_is_expected_to_stay_as_it_is():
    assert numbers(LikelyMasks().behind(mask(7), 3)) == [7, 7, 7]


def test_the_mask_that_has_followed_most_often_is_expected():
    likely = LikelyMasks()
    for before, after in [(1, 2), (1, 3), (1, 3), (3, 1)]:
        likely.note(mask(before), mask(after))
    assert numbers(likely.behind(mask(1), 4)) == [1, 3, 1, 3]
    assert numbers(likely.behind(mask(2), 2)) == [2, 2]


def test_a_row_gets_no_more_masks_than_a_command_may_have():
    likely = LikelyMasks()
    for number in range(MASKS_OF_ROW + 2):
        likely.note(mask(number), mask(number + 1))
    assert numbers(likely.behind(mask(0), 16)) == list(range(MASKS_OF_ROW))


@pytest.mark.parametrize("turns", [1, 3])
def test_few_masks_are_remembered(turns):
    likely = LikelyMasks()
    for number in range(turns * REMEMBERED):
        likely.note(mask(number), mask(number + 1))
    known = [
        number for number in range(turns * REMEMBERED) if numbers(likely.behind(mask(number), 2))[1] != number
    ]
    assert 0 < len(known) <= REMEMBERED + 1
