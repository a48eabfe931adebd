import asyncio

import pytest

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.bases.served_base import BaseHistory
from spmd_tx.coordinator.groups import run_groups
from spmd_tx.coordinator.groups.late_groups import LateGroup, LateGroups
from spmd_tx.errors import StartError

SECONDS = 10


@pytest.fixture
def late():
    config = ServerConfig(base_model="/models/x", served_model_name="large", group="teacher")
    return LateGroup(config, BaseHistory("large", ("large",)), "no such folder")


class Opening:
    """Fails as often as it is told, then opens the group."""

    def __init__(self, failures):
        self.failures = failures
        self.opened = asyncio.Event()

    async def open(self, late):
        if self.failures:
            self.failures -= 1
            raise StartError("still no such folder")
        return "group"

    async def run(self, group):
        assert group == "group"
        self.opened.set()
        await asyncio.Event().wait()


async def running(opening, late):
    task = asyncio.create_task(LateGroups([late], opening.open).run(opening.run))
    try:
        async with asyncio.timeout(SECONDS):
            await opening.opened.wait()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_group_is_opened_when_an_agent_asks_for_it(late):
    late.joined.set()
    await running(Opening(0), late)
    assert late.health.story() == "group teacher has failed, and tried again later: no such folder"
    assert not late.joined.is_set()


async def test_a_group_is_opened_when_its_model_can_be_read_at_last(late, monkeypatch):
    monkeypatch.setattr(run_groups, "PAUSES", (0.01, 0.02))
    await running(Opening(3), late)
    assert late.health.problem == "still no such folder"


async def test_without_such_groups_nothing_ends():
    task = asyncio.create_task(LateGroups([], Opening(0).open).run(Opening(0).run))
    done, _ = await asyncio.wait([task], timeout=0.05)
    assert not done
    task.cancel()
