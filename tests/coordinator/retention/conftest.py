import pytest

from spmd_tx.coordinator.requests import payload_files as payloads
from spmd_tx.coordinator.requests.payload_files import PayloadFiles
from spmd_tx.coordinator.retention.reaper import Reaper
from spmd_tx.coordinator.runtime import clock
from tests.coordinator.retention.contents import HOUR, LIMITS


@pytest.fixture
async def reaper(database, tmp_path):
    """Of a server that has run for a day."""
    reaper = Reaper(database, tmp_path, LIMITS)
    reaper._started_at -= 24 * HOUR
    return reaper


@pytest.fixture
def now():
    return clock.now()


@pytest.fixture
def payload_files(tmp_path, monkeypatch, all_in_files):
    """Files 0 to 3."""
    monkeypatch.setattr(payloads, "SEGMENT_BYTES", 1)
    files = PayloadFiles(tmp_path / "payloads")
    for _ in range(4):
        files.write([b"body"])
    yield files
    files.close()
