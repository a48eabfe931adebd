import unicodedata

import pytest

from spmd_tx.coordinator.wire import checkpoint_paths
from spmd_tx.coordinator.wire.checkpoint_paths import CheckpointPath
from spmd_tx.errors import InvalidRequest

OUTSIDE = ["", ".", "..", ".hidden", "a/b", "a\\b", "a\0b", "a\nb", "x" * 201, "ü" * 101]
# Earlier versions have taken these names.
MISREAD = [
    "final#2",
    "best?acc=0.9",
    "a%20b",
    "100%",
    "a\ufffd",
    " a",
    "a ",
    "a.",
    "fine\u0301",
    "a*",
    "a[1]",
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_that_could_leave_their_folder_are_refused(name):
    with pytest.raises(InvalidRequest, match="a checkpoint"):
        checkpoint_paths.check_name("a checkpoint", name)
    with pytest.raises(InvalidRequest, match="a checkpoint"):
        checkpoint_paths.check_new_name(name)


@pytest.mark.parametrize("name", MISREAD)
def test_new_names_that_could_be_read_otherwise_are_refused_and_old_ones_are_not(name):
    with pytest.raises(InvalidRequest, match="cannot be the name of a checkpoint"):
        checkpoint_paths.check_new_name(name)
    text = f"tinker://s:train:0/weights/{name}"
    assert str(checkpoint_paths.parse(text)) == text


def test_a_refusal_tells_what_a_name_may_hold():
    with pytest.raises(InvalidRequest) as caught:
        checkpoint_paths.check_new_name("final#2")
    for part in ("'final#2'", "letters, digits, spaces", "/ \\ # ? % * [ ]", "at its beginning or end"):
        assert part in str(caught.value)


def test_a_name_in_another_form_of_unicode_is_told_its_usual_one():
    twin = unicodedata.normalize("NFD", "finé")
    with pytest.raises(InvalidRequest, match=r"'fin\\xe9'"):
        checkpoint_paths.check_new_name(twin)


@pytest.mark.parametrize(
    "name", ["step-000001", "lr=1e-4 (final)", "ü" * 100, "a..b", "x.partial", "最終", "a+b&c;d:e@f,g~h'i!$"]
)
def test_other_names_are_taken(name):
    checkpoint_paths.check_name("a checkpoint", name)
    checkpoint_paths.check_new_name(name)


def test_a_path_is_read_and_written():
    text = "tinker://s:train:0/sampler_weights/n"
    assert checkpoint_paths.parse(text) == CheckpointPath("s:train:0", "sampler_weights", "n")
    assert str(checkpoint_paths.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "n",
        "tinker://r/n",
        "tinker://r/other/n",
        "http://r/weights/n",
        "tinker://../weights/n",
        "tinker://r/weights/a/b",
    ],
)
def test_anything_else_is_no_path(text):
    with pytest.raises(InvalidRequest):
        checkpoint_paths.parse(text)


@pytest.mark.parametrize("name", ["#" * 10**6, "\n" * 10**6, "\udcff" * 201])
def test_a_refusal_of_a_long_name_is_short(name):
    for check in (checkpoint_paths.check_new_name, checkpoint_paths.parse):
        with pytest.raises(InvalidRequest) as caught:
            check(name)
        assert len(str(caught.value)) < 4000
