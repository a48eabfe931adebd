"""Makes small real file systems for tests, which can be full or read-only."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 1 MiB."""
    place = tmp_path / "small-disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a file system needs root")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def make_read_only(disk: Path, is_read_only: bool = True) -> None:
    option = f"remount,{'ro' if is_read_only else 'rw'}"
    subprocess.run(["mount", "-o", option, str(disk)], check=True)


def fill(disk: Path) -> Path:
    """Fill the disk; return the file to delete to free it again."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return ballast


@pytest.fixture
def synced(monkeypatch):
    """Record what is made durable from now on, in order."""
    paths = []
    sync = os.fsync

    def fsync(descriptor):
        sync(descriptor)
        paths.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(os, "fsync", fsync)
    return paths
