import pytest

from spmd_tx.byte_sizes import parse_size, show_size


@pytest.mark.parametrize(
    "text, expected",
    [("0", 0), ("512", 512), ("1.5GiB", 3 << 29), ("2 MB", 2_000_000), ("5%", 50), ("100 %", 1000)],
)
def test_a_size_is_bytes_with_a_unit_or_a_share(text, expected):
    assert parse_size(text, whole=1000) == expected


@pytest.mark.parametrize("text", ["", "many", "-1", "1 XB", "101%", "1e3", "GiB"])
def test_what_is_no_size_is_refused_with_examples(text):
    with pytest.raises(ValueError, match="write it as 500MB"):
        parse_size(text, whole=1000)


@pytest.mark.parametrize(
    "size, shown",
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 29, "1.5 GiB"), (1 << 50, "1024.0 TiB")],
)
def test_sizes_are_shown_short(size, shown):
    assert show_size(size) == shown
