"""Benchmarks that run for an hour find the marks between which they write their figures."""

import pytest

from tests.aot import page as aot
from tools.bench import compare, families, h200, h200_page, tenants


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->", f"<!-- end of {name} -->"


@pytest.mark.parametrize(
    ("page", "begin", "end"),
    [
        (compare.PAGE, *marks("make bench")),
        (tenants.PAGE, *marks("tools.bench.tenants")),
        (families.PAGE, *marks(families.MARK)),
        (aot.PAGE, *marks(aot.MARK)),
        (h200.PAGE, h200_page.BEGIN, h200_page.END),
    ],
)
def test_a_page_has_the_marks_of_its_writer(page, begin, end):
    before, found, rest = page.read_text().partition(begin)
    assert found
    assert end in rest
    assert begin not in before + rest
