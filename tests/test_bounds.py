import pytest

from spmd_tx.bounds import Bounds, bounds_of, reaches
from spmd_tx.errors import StartError
from spmd_tx.options import declared
from tests import write_limits_page


def test_the_page_lists_every_bound_as_it_is():
    assert write_limits_page.PAGE.read_text() == write_limits_page.page(), f"run: {write_limits_page.COMMAND}"


def test_every_bound_says_what_it_means_and_its_default_is_in_its_range():
    ranges = reaches()
    assert list(ranges) == list(Bounds.__struct_fields__)
    for name, bound in declared(Bounds):
        default, reach = getattr(Bounds(), name), ranges[name]
        assert default in reach
        assert isinstance(default, int) or not reach.is_whole
        assert bound.help.endswith((".", ")"))


def test_numbers_and_sizes_are_taken():
    chosen = bounds_of({"stop_strings": "3", "stop_string_bytes": "4KiB"})
    assert chosen == Bounds(stop_strings=3, stop_string_bytes=4096)
    assert bounds_of({}) == Bounds()


@pytest.mark.parametrize(
    "name, value, complaint",
    [
        (
            "stop_strings",
            "x",
            "--limit stop_strings=x is not possible; it must be a whole number, at least 0",
        ),
        ("stop_strings", "-1", "must be a whole number, at least 0"),
        ("stop_strings", "True", "must be a whole number"),
        ("stop_strings", "1.5", "must be a whole number"),
        ("stop_strings", "9" * 5000, "must be a whole number"),
        ("stop_string_bytes", "0", "or a size as 64MiB, at least 1"),
        ("stop_string_bytes", "9" * 400, "or a size as 64MiB"),
        ("body_seconds", "0", "must be a number, more than 0"),
        ("stop_string_bytes", "nan", "or a size as 64MiB"),
        ("body_seconds", "inf", "more than 0, at most 2147483647"),
        ("open_sessions", str(10**30), "at least 1, at most 9223372036854775807"),
        ("stop_strigns", "1", "did you mean stop_strings?"),
        ("speed", "1", "docs/limits.md lists them"),
    ],
)
def test_what_cannot_be_a_bound_is_named_with_the_remedy(name, value, complaint):
    with pytest.raises(StartError) as refused:
        bounds_of({name: value})
    assert complaint in str(refused.value)
