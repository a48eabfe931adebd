import pyrage
import pytest

from spmd_tx.coordinator.checkpoints import age

SSH = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHL2I6h1KrWs4lZ8qGr9D3gFTbD6I18IJ8qPa/3ItZ9C alice@example.org"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.json").write_bytes(b"{}")
    (tmp_path / "inner" / "b.bin").write_bytes(b"weights")
    return tmp_path


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_each_recipient_can_read_every_file_and_none_is_left_as_it_was(folder):
    identities = [pyrage.x25519.Identity.generate() for _ in range(2)]
    age.encrypt(str(folder), [*(str(each.to_public()) for each in identities), SSH])
    assert names(folder) == ["a.json.age", "inner/b.bin.age"]
    for identity in identities:
        assert pyrage.decrypt((folder / "inner" / "b.bin.age").read_bytes(), [identity]) == b"weights"


def test_what_was_interrupted_is_gone_on_with(folder):
    identity = pyrage.x25519.Identity.generate()
    recipients = [str(identity.to_public())]
    (folder / "a.json.age.tmp").write_bytes(b"half")
    age.encrypt(str(folder), recipients)
    age.encrypt(str(folder), recipients)
    assert names(folder) == ["a.json.age", "inner/b.bin.age"]
    assert pyrage.decrypt((folder / "a.json.age").read_bytes(), [identity]) == b"{}"
