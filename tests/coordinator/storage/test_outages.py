import errno

import pytest
from sqlalchemy.exc import IntegrityError, NoResultFound, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from spmd_tx.coordinator.storage import outages
from spmd_tx.coordinator.storage.outages import retry_through_outages
from spmd_tx.errors import MeshError

OUTAGES = [
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EROFS, "Read-only file system"),
    ConnectionRefusedError(),
    TimeoutError(),
    OperationalError("SELECT", None, Exception("database is locked")),
    PoolTimeoutError(),
]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(outages, "RETRY_SECONDS", 0.0)


def failing(*errors):
    """Work that fails in these ways, one after the other, and then succeeds."""
    remaining = list(errors)

    async def work():
        if remaining:
            raise remaining.pop(0)
        return "done"

    return work


async def test_outages_are_waited_for():
    assert await retry_through_outages(failing(*OUTAGES)) == "done"


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("gone"),
        OSError(errno.EIO, "bad sector"),
        IntegrityError("INSERT", None, Exception()),
        NoResultFound(),
    ],
    ids=repr,
)
async def test_what_does_not_go_away_is_not_tried_again(error):
    with pytest.raises(type(error)):
        await retry_through_outages(failing(error))


async def test_nobody_waits_for_the_sake_of_lost_workers():
    with pytest.raises(MeshError):
        await retry_through_outages(failing(OUTAGES[0]), is_pointless=lambda: True)
