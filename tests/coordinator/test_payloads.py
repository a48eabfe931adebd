import pytest

from spmd_tx.coordinator.payloads import PayloadFiles, Recent
from spmd_tx.errors import StartError


@pytest.fixture
def files(tmp_path):
    files = PayloadFiles(tmp_path / "payloads")
    yield files
    files.close()


def test_each_body_of_a_group_is_found_again(files):
    bodies = [b"first", b"", b"x" * 100_000]
    assert [files.read(place) for place in files.write(bodies)] == bodies


def test_a_group_is_one_file(files):
    files.write([b"a", b"b"])
    files.write([b"c"])
    assert files.numbers() == [0, 1]


def test_bodies_are_there_after_a_restart_and_numbers_go_on(tmp_path):
    first = PayloadFiles(tmp_path)
    (place,) = first.write([b"kept"])
    first.close()
    second = PayloadFiles(tmp_path)
    (later,) = second.write([b"new"])
    assert second.read(place) == b"kept"
    assert later.file == place.file + 1
    second.close()


def test_what_an_interrupted_write_left_is_removed(tmp_path):
    (tmp_path / "000000000003.tmp").write_bytes(b"half")
    files = PayloadFiles(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock"]
    files.close()


def test_only_the_files_named_are_deleted(files):
    (gone,) = files.write([b"gone"])
    (kept,) = files.write([b"kept"])
    files.delete([gone.file])
    assert files.numbers() == [kept.file]


def test_a_second_server_on_the_same_directory_is_refused(files, tmp_path):
    with pytest.raises(StartError, match="another running server"):
        PayloadFiles(tmp_path / "payloads")


def test_the_least_recently_used_is_forgotten_first():
    recent = Recent(capacity=10)
    recent.put("a", 1, size=4)
    recent.put("b", 2, size=4)
    recent.get("a")
    recent.put("c", 3, size=4)
    assert [recent.get(key) for key in "abc"] == [1, None, 3]


def test_what_is_larger_than_the_capacity_is_not_kept():
    recent = Recent(capacity=10)
    recent.put("a", 1, size=4)
    recent.put("b", 2, size=11)
    assert [recent.get(key) for key in "ab"] == [1, None]
