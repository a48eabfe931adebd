import asyncio
from types import SimpleNamespace

import pytest

from spmd_tx.coordinator.groups import run_groups
from spmd_tx.coordinator.groups.run_groups import GroupRuns
from spmd_tx.errors import CrashLoop, StartError

SECONDS = 10


class FakeGenerations:
    def __init__(self):
        self.joined = asyncio.Event()
        self.roster = SimpleNamespace(another=self.another_agent)
        self.given_up = []
        self.looks = 0

    async def look_again(self):
        self.looks += 1

    async def give_up(self, error):
        self.given_up.append(error)

    async def another_agent(self):
        await self.joined.wait()
        self.joined.clear()


class FakeGroup:
    """Runs as it is told: each entry of ``ends`` is an error, or None for a run that goes on."""

    def __init__(self, name, *ends):
        self.name, self.ends = name, list(ends)
        self.health = SimpleNamespace(problem=None)
        self.generations = FakeGenerations()
        self.runs = 0
        self.is_running = asyncio.Event()

    async def run(self, on_ready):
        self.runs += 1
        end = self.ends.pop(0)
        if end is not None:
            raise end
        on_ready(self, "ready")
        self.is_running.set()
        await asyncio.Event().wait()


@pytest.fixture
async def start():
    tasks = []

    def start(*groups):
        tasks.append(asyncio.create_task(GroupRuns(groups, lambda group, ready: None).run()))
        return tasks[-1]

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def until(event):
    async with asyncio.timeout(SECONDS):
        await event.wait()


async def test_a_group_that_fails_leaves_the_others_alone_and_says_why(start):
    main, teacher = FakeGroup("main", None), FakeGroup("teacher", StartError("no such weights"))
    running = start(main, teacher)
    await until(main.is_running)
    while not teacher.generations.given_up:
        await asyncio.sleep(0)
    assert teacher.health.problem == "no such weights"
    assert main.health.problem is None
    assert not running.done()
    assert main.runs == 1


async def test_it_is_tried_again_when_an_agent_joins(start):
    main, teacher = FakeGroup("main", None), FakeGroup("teacher", CrashLoop("again and again"), None)
    start(main, teacher)
    await until(main.is_running)
    teacher.generations.joined.set()
    await until(teacher.is_running)
    assert teacher.health.problem is None


async def test_it_is_tried_again_after_ever_longer_pauses(start, monkeypatch):
    waited = []

    async def another_agent():
        waited.append(asyncio.current_task())
        await asyncio.Event().wait()

    monkeypatch.setattr(run_groups, "PAUSES", (0.01, 0.02))
    failures = [StartError("still damaged")] * 4
    main, teacher = FakeGroup("main", None), FakeGroup("teacher", *failures, None)
    teacher.generations.roster.another = another_agent
    start(main, teacher)
    await until(teacher.is_running)
    assert teacher.runs == 5
    assert teacher.generations.looks == 4, "its files may have been repaired"
    assert len(waited) == 4


async def test_the_server_ends_when_all_groups_have_failed(start):
    main, teacher = FakeGroup("main", StartError("no room")), FakeGroup("teacher", StartError("no weights"))
    with pytest.raises(StartError, match="all groups have failed: main: no room; teacher: no weights"):
        await start(main, teacher)


async def test_the_error_of_the_only_group_is_the_servers(start):
    with pytest.raises(CrashLoop, match=r"^again and again$"):
        await start(FakeGroup("main", CrashLoop("again and again")))


async def test_an_error_that_nobody_foresaw_ends_all(start):
    with pytest.raises(ZeroDivisionError):
        await start(FakeGroup("main", None), FakeGroup("teacher", ZeroDivisionError()))
