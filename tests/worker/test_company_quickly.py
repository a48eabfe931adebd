"""Company changes no bit of programs that are not optimized, and so compiled in a quarter of the time.

What they compute decides that, not only how XLA compiles it; test_company.py compiles as a server does.
"""

import pytest

from tests.support.tiny_engine import mesh_name, tiny_engine
from tests.worker.test_company import (
    assert_company_changes_nothing,
    assert_same_on_any_pair,
    of_sequences,
    with_targets,
)

pytestmark = pytest.mark.usefixtures("quickly_compiled")


def test_a_request_on_two_data_shards_gives_the_same_bits_on_any_pair():
    assert_same_on_any_pair(tiny_engine((2, 2, 2), kind="mixture", split_base=True))


@pytest.mark.parametrize(
    "shape, made_special",
    [((1, 1, 1), with_targets), ((2, 2, 2), of_sequences)],
    ids=lambda value: mesh_name(value) if isinstance(value, tuple) else value.__name__,
)
def test_company_changes_no_bit_of_special_programs(shape, made_special):
    assert_company_changes_nothing(tiny_engine(shape), made_special)
