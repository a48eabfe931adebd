import pytest

from spmd_tx.errors import InvalidRequest
from spmd_tx.images.headers import Header, read_header
from tests.support.pictures import encoded, jpeg, noise, png


@pytest.mark.parametrize(
    "content, header",
    [
        (png(37, 911), Header("png", 37, 911)),
        (jpeg(911, 37), Header("jpeg", 911, 37)),
        (encoded(noise(40, 50), "jpeg", progressive=True), Header("jpeg", 40, 50)),
        (encoded(noise(40, 50, channels=1), "jpeg"), Header("jpeg", 40, 50)),
        (encoded(noise(40, 50), "jpeg", icc_profile=b"x" * 100_000), Header("jpeg", 40, 50)),
        (encoded(noise(40, 50).convert("CMYK"), "jpeg"), Header("jpeg", 40, 50)),
        (encoded(noise(40, 50).convert("1"), "png"), Header("png", 40, 50)),
    ],
    ids=["png", "jpeg", "progressive", "grey", "a long profile", "cmyk", "one bit"],
)
def test_the_bytes_say_format_and_size(content, header):
    assert read_header(content) == header


@pytest.mark.parametrize(
    "content, problem",
    [
        (encoded(noise(40, 50), "gif"), "a GIF; send a PNG or JPEG"),
        (encoded(noise(40, 50), "webp"), "a WebP; send a PNG or JPEG"),
        (b"\0\0\0 ftypavif", "a HEIC, AVIF or video"),
        (b"<svg", "an SVG"),
        (b"", "no bytes at all"),
        (b"hello", "neither PNG nor JPEG, it begins with b'hello'"),
        (png()[:20], "a PNG without a header"),
        (jpeg()[:30], "a JPEG without a header of a frame"),
        (b"\xff\xd8" + b"\xff\xe0\0\0" * 8, "a JPEG without a header of a frame"),
        (png().replace((96).to_bytes(4), bytes(4), 1), "a png of 0 x 64 pixels, which is empty"),
    ],
)
def test_what_is_no_whole_png_or_jpeg_is_refused(content, problem):
    with pytest.raises(InvalidRequest, match=problem):
        read_header(content)
