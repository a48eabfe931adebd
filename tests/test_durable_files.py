import os
import threading

import pytest

from spmd_tx import durable_files
from spmd_tx.durable_files import (
    make_folder,
    new_folder,
    put_in_place,
    sync_name,
    sync_tree,
    unique_beside,
    write_file,
)


def folder_with(path, content):
    path.mkdir()
    (path / "file").write_text(content)
    return path


@pytest.fixture(params=["exchanging", "one after the other"])
def way(request, monkeypatch):
    """How names change: where the kernel can exchange them, and where it cannot."""
    if request.param != "exchanging":
        monkeypatch.setattr(durable_files, "_exchange", lambda *_: False)
    return request.param


def test_a_folder_takes_the_place_of_another_which_is_handed_over(tmp_path, way):
    place = folder_with(tmp_path / "place", "old")
    replaced = put_in_place(folder_with(tmp_path / "new", "new"), place)
    assert (place / "file").read_text() == "new"
    assert (replaced / "file").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == sorted(["place", replaced.name])


def test_a_folder_takes_a_free_place(tmp_path, way):
    assert put_in_place(folder_with(tmp_path / "new", "new"), tmp_path / "place") is None
    assert os.listdir(tmp_path) == ["place"]


def test_there_is_no_moment_without_a_folder(tmp_path):
    place = folder_with(tmp_path / "place", "0")
    if not durable_files._exchange(folder_with(tmp_path / "other", "0"), place):
        pytest.skip("this file system cannot exchange names")
    is_over = threading.Event()

    def replace():
        for number in range(300):
            put_in_place(folder_with(tmp_path / "new", str(number)), place)
        is_over.set()

    replacing = threading.Thread(target=replace)
    replacing.start()
    looks = 0
    while not is_over.is_set():
        assert (place / "file").exists()
        looks += 1
    replacing.join()
    assert looks > 300


def test_names_beside_a_place_are_never_the_same(tmp_path):
    assert unique_beside(tmp_path / "a.b", "staged") != unique_beside(tmp_path / "a.b", "staged")


def test_everything_in_a_folder_is_synced(tmp_path, synced):
    (tmp_path / "inner" / "empty").mkdir(parents=True)
    (tmp_path / "inner" / "file").write_text("x")
    sync_tree(tmp_path)
    assert set(synced) == {tmp_path, *tmp_path.rglob("*")}


def test_a_new_folder_is_synced_in_the_first_one_that_was_there(tmp_path, synced):
    make_folder(tmp_path / "a" / "b")
    assert set(synced) == {tmp_path, tmp_path / "a"}
    synced.clear()
    make_folder(tmp_path / "a" / "b")
    assert synced == []


def test_a_name_is_synced_as_far_as_the_base(tmp_path, synced):
    (tmp_path / "a" / "b").mkdir(parents=True)
    sync_name(tmp_path / "a" / "b", tmp_path)
    assert synced == [tmp_path / "a", tmp_path]


def test_a_file_is_synced_before_it_has_its_name_and_its_name_then(tmp_path, synced):
    write_file(tmp_path / "file", b"x")
    assert synced == [tmp_path / ".file.tmp", tmp_path]
    assert (tmp_path / "file").read_bytes() == b"x"


def test_replaced_names_are_synced(tmp_path, way, synced):
    place = folder_with(tmp_path / "place", "old")
    put_in_place(folder_with(tmp_path / "new", "new"), place)
    assert synced == [tmp_path]


def test_a_new_folder_replaces_the_old_one_when_it_is_complete(tmp_path, way):
    place = folder_with(tmp_path / "place", "old")
    with new_folder(place) as folder:
        (folder / "file").write_text("new")
        assert (place / "file").read_text() == "old"
    assert (place / "file").read_text() == "new"
    assert os.listdir(tmp_path) == ["place"]


def test_a_new_folder_that_fails_leaves_nothing_behind(tmp_path):
    place = folder_with(tmp_path / "place", "old")

    def write_half() -> None:
        with new_folder(place) as folder:
            (folder / "file").write_text("half")
            raise RuntimeError("half")

    with pytest.raises(RuntimeError, match="half"):
        write_half()
    assert (place / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["place"]
