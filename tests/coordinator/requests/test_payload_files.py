import os
import random

import pytest
import zstandard

from spmd_tx.coordinator.requests import payload_files
from spmd_tx.coordinator.requests.payload_files import PayloadFiles
from spmd_tx.coordinator.requests.records import BodyPlace
from spmd_tx.coordinator.runtime.byte_lru import ByteLru
from spmd_tx.errors import DamagedBody, StartError

pytestmark = pytest.mark.usefixtures("all_in_files")


@pytest.fixture
def files(tmp_path):
    files = PayloadFiles(tmp_path / "payloads")
    yield files
    files.close()


def test_each_body_of_a_group_is_found_again(files):
    bodies = [b"first", b"", b"x" * 100_000]
    assert [files.read(place) for place in files.write(bodies)] == bodies


def test_small_bodies_are_left_to_their_rows(files, monkeypatch):
    monkeypatch.setattr(payload_files, "SMALL_BYTES", 4)
    bodies = [b"four", b"", b"large", b"x"]
    four, empty, large, x = files.write(bodies)
    assert (four, empty, x) == (b"four", b"", b"x")
    assert [files.read(each) for each in (four, empty, large, x)] == bodies
    assert isinstance(large, BodyPlace)


def test_a_group_of_small_bodies_makes_no_file(files, monkeypatch):
    monkeypatch.setattr(payload_files, "SMALL_BYTES", 4)
    assert files.write([b"four", b""]) == [b"four", b""]
    assert files.numbers() == []


def test_groups_share_a_file_until_it_is_full_or_old(files, monkeypatch):
    places = files.write([b"a", b"b"]) + files.write([b"c"])
    assert [place.file for place in places] == [0, 0, 0]
    monkeypatch.setattr(payload_files, "SEGMENT_BYTES", 1)
    places += files.write([b"d"])
    monkeypatch.setattr(payload_files, "SEGMENT_BYTES", 1 << 20)
    places += files.write([b"e"])
    monkeypatch.setattr(payload_files, "SEGMENT_SECONDS", 0.0)
    places += files.write([b"f"])
    assert [place.file for place in places[3:]] == [1, 1, 2]
    assert [files.read(place) for place in places] == [b"a", b"b", b"c", b"d", b"e", b"f"]


def test_a_write_that_fails_spoils_nothing_that_was_written_before(small_disk):
    files = PayloadFiles(small_disk / "payloads")
    (before,) = files.write([b"before"])
    with pytest.raises(OSError, match="No space left"):
        files.write([random.Random(0).randbytes(2 << 20)])
    assert (small_disk / "payloads" / "000000000000.zst").stat().st_size == before.length
    (behind,) = files.write([b"behind"])
    assert [files.read(before), files.read(behind)] == [b"before", b"behind"]
    files.close()


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


def test_only_the_files_named_are_deleted(files, monkeypatch):
    monkeypatch.setattr(payload_files, "SEGMENT_BYTES", 1)
    (gone,) = files.write([b"gone"])
    (kept,) = files.write([b"kept"])
    files.delete([gone.file])
    assert files.numbers() == [kept.file]


def test_a_second_server_on_the_same_directory_is_refused(files, tmp_path):
    with pytest.raises(StartError, match=rf"in use by another running server \(process {os.getpid()} on "):
        PayloadFiles(tmp_path / "payloads")


def flip_a_bit(path, offset):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("distance", [1, 4, 5, 300])
def test_a_flipped_bit_anywhere_in_a_body_is_found(files, tmp_path, distance):
    before, place = files.write([b"before", random.Random(0).randbytes(1000)])
    flip_a_bit(tmp_path / "payloads" / "000000000000.zst", place.offset + place.length - distance)
    with pytest.raises(DamagedBody, match=rf"000000000000\.zst is damaged in the {place.length} bytes"):
        files.read(place)
    assert files.read(before) == b"before"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_body_that_is_cut_off_or_gone_is_named_with_its_file(files, tmp_path, is_there):
    (place,) = files.write([b"body"])
    path = tmp_path / "payloads" / "000000000000.zst"
    path.unlink()
    if is_there:
        path.write_bytes(b"short")
    with pytest.raises(DamagedBody, match=r"000000000000\.zst is (truncated|missing)"):
        files.read(place)


def test_files_of_the_first_version_had_no_checksums_and_can_be_read(files, tmp_path):
    frame = zstandard.ZstdCompressor(level=1).compress(b"old")
    (tmp_path / "payloads" / "000000000007.zst").write_bytes(frame)
    assert files.read(BodyPlace(7, 0, len(frame))) == b"old"


def test_a_write_that_fails_leaves_no_part_of_it(small_disk):
    files = PayloadFiles(small_disk / "payloads")
    with pytest.raises(OSError, match="No space left"):
        files.write([random.Random(0).randbytes(2 << 20)])
    assert [path.name for path in (small_disk / "payloads").iterdir()] == ["lock"]
    (place,) = files.write([b"small"])
    assert files.read(place) == b"small"
    files.close()


def test_the_least_recently_used_is_forgotten_first():
    recent = ByteLru(capacity=10)
    recent.put("a", 1, size=4)
    recent.put("b", 2, size=4)
    recent.get("a")
    recent.put("c", 3, size=4)
    assert [recent.get(key) for key in "abc"] == [1, None, 3]


def test_what_is_larger_than_the_capacity_is_not_kept():
    recent = ByteLru(capacity=10)
    recent.put("a", 1, size=4)
    recent.put("b", 2, size=11)
    assert [recent.get(key) for key in "ab"] == [1, None]
