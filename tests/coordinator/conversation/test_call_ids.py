import re

from spmd_tx.coordinator.conversation.call_ids import call_id


def test_ids_are_different_and_the_same_again():
    ids = [call_id(*place) for place in [("a", 0, 0), ("a", 0, 1), ("a", 1, 0), ("b", 0, 0)]]
    assert len(set(ids)) == 4
    assert call_id("a", 0, 1) == ids[1]
    assert all(re.fullmatch("call_[A-Za-z0-9]{24}", id) for id in ids)
