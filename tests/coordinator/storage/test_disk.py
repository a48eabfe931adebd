from spmd_tx.coordinator.storage.disk import by_kind


def test_disk_use_is_told_by_kind(tmp_path):
    for name, size in (("payloads/1.zst", 10), ("versions/a/b/c", 20), ("spmd_tx.db-wal", 30), ("new/x", 40)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    found = by_kind(tmp_path)
    assert {kind: size for kind, size in found.items() if size} == {
        "payloads": 10,
        "versions": 20,
        "database": 30,
        "other": 40,
    }
    assert "snapshots" in found
