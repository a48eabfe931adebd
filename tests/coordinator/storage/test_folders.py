import json

import pytest

from spmd_tx.coordinator.storage.folders import FORMAT, MANIFEST, is_intact, write_manifest


@pytest.fixture
def folder(tmp_path):
    """A folder with a file of its own and one further inside, sealed."""
    folder = tmp_path / "snapshot"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "weights").write_bytes(b"weights" * 1000)
    (folder / "step").write_text("3")
    write_manifest(folder, folder.parent)
    return folder


def test_a_sealed_folder_is_intact(folder):
    assert is_intact(folder) is None


def test_sealing_again_takes_in_what_has_changed(folder):
    (folder / "step").write_text("44")
    write_manifest(folder, folder.parent)
    assert is_intact(folder) is None


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "a flipped bit": (flip_a_bit, "inner/weights has another content"),
    "a truncated file": (lambda path: path.write_bytes(b"weigh"), "has 5 bytes instead of 7000"),
    "an empty file": (lambda path: path.write_bytes(b""), "has 0 bytes instead of 7000"),
    "a missing file": (lambda path: path.unlink(), "inner/weights is missing"),
}


@pytest.mark.parametrize("damage, problem", DAMAGES.values(), ids=DAMAGES)
def test_damage_is_named_with_its_file(folder, damage, problem):
    damage(folder / "inner" / "weights")
    assert problem in is_intact(folder)


def test_a_folder_whose_writing_was_interrupted_is_not_intact(folder):
    (folder / MANIFEST).unlink()
    assert is_intact(folder) == f"{folder / MANIFEST} is missing"


@pytest.mark.parametrize("kept", [0, 1, 40])
def test_a_truncated_manifest_is_damage(folder, kept):
    (folder / MANIFEST).write_bytes((folder / MANIFEST).read_bytes()[:kept])
    assert "is damaged" in is_intact(folder)


def test_a_folder_that_is_not_there_is_not_intact(tmp_path):
    assert "is missing" in is_intact(tmp_path / "none")


def test_a_folder_of_a_newer_version_is_refused_by_its_number(folder):
    newer = {"format": FORMAT + 1, "files": ["laid out in another way"]}
    (folder / MANIFEST).write_text(json.dumps(newer))
    assert f"has format {FORMAT + 1}, of a newer version; this one reads up to {FORMAT}" in is_intact(folder)


def test_fields_that_a_newer_version_has_added_are_no_damage(folder):
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"written_by": "9.9"}))
    assert is_intact(folder) is None


def test_a_sealed_folder_is_durable_as_far_as_its_base(tmp_path, synced):
    folder = tmp_path / "snapshots" / "model" / "3"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "weights").write_bytes(b"weights")
    write_manifest(folder, tmp_path)
    around = {folder.parent, folder.parent.parent, tmp_path}
    assert {folder / "inner" / "weights", folder / "inner", folder} | around <= set(synced)
