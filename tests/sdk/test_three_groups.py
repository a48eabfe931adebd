"""A model that trains, one that samples for it and a teacher behind one address, through losses of each."""

from tests.sdk.test_groups import assert_both_are_served, assert_neither_notices_the_others_losses, group_of
from tests.sdk.test_groups import teacher_dir as teacher_dir
from tests.sdk.test_sampling_groups import (
    OPTIONS,
    assert_ends_in_order,
    assert_same_through_a_kill,
    serving_both,
)


def test_no_group_notices_the_losses_of_another(model_dir, teacher_dir, tmp_path):
    groups = [OPTIONS["group"], group_of(teacher_dir)]
    with serving_both(model_dir, tmp_path / "data", group=groups) as address:
        assert_both_are_served(address.server)
        assert_same_through_a_kill(address)
        assert_neither_notices_the_others_losses(address.server)
        assert_ends_in_order(address)
