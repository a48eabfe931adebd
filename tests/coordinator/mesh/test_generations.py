import asyncio
import os
import signal

import pytest

from spmd_tx.coordinator.agent.oom_kills import OomKills
from spmd_tx.coordinator.mesh import generations, roster, watchdog
from spmd_tx.coordinator.runtime import log_groups
from spmd_tx.errors import CrashLoop, StartError, WorkerLost
from spmd_tx.protocol.reports import Failure
from tests.coordinator.mesh import fake_worker
from tests.coordinator.mesh.worker_group import worker_group, write_model

SILENT_SECONDS = 3.0  # a busy machine leaves a worker without a turn for one


@pytest.fixture
def model_dir(tmp_path):
    return write_model(tmp_path / "model")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(generations, "FIRST_DELAY", 0.01)
    monkeypatch.setattr(generations, "EXPLANATION_SECONDS", 0.5)
    monkeypatch.setattr(generations, "TICK_SECONDS", 0.1)


async def test_two_workers_run_commands_as_one(model_dir):
    async with worker_group(model_dir, processes=2) as group:
        assert (await group.until_ready()).plan.pages == fake_worker.PAGES
        await group.create()
        assert group.hub.answered == 1
        await group.generations.shut_down(patience=30)
        assert [await task for task in group.tasks[3:]] == [None, None]
        assert group.hub.answered == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=lambda number: number.name)
async def test_a_worker_that_is_killed_is_followed_by_a_generation_of_new_ones(model_dir, number):
    async with worker_group(model_dir, processes=2) as group:
        await group.until_ready()
        pids = group.worker_pid(0), group.worker_pid(1)
        hanging = asyncio.create_task(group.create(fake_worker.HANG))
        await asyncio.sleep(0.1)
        os.kill(pids[1], number)
        with pytest.raises(WorkerLost) as lost:
            await hanging
        place = f"worker 1 on {group.roster.host(1)}"
        story = (
            f"{place} was killed by signal {number.value} ({number.name}), during command 0 (create_adapter)"
        )
        assert str(lost.value) == story
        assert lost.value.by_command == (number == signal.SIGSEGV)
        assert group.hub.busy.startswith(f"restarting the workers: {story}")
        await group.until_ready()
        await group.create()
        assert group.counted == 2
        assert {group.worker_pid(0), group.worker_pid(1)}.isdisjoint(pids)
        assert group.hub.busy is None


@pytest.mark.parametrize(
    "seed, story",
    [
        (fake_worker.RAISE, "failed: ValueError: on purpose, during command 0"),
        (fake_worker.EXIT, "exited with code 7, during command 0"),
    ],
    ids=["exception", "exit"],
)
async def test_a_worker_that_fails_is_followed_by_a_new_one_and_its_command_is_blamed(model_dir, seed, story):
    async with worker_group(model_dir) as group:
        await group.until_ready()
        with pytest.raises(WorkerLost, match=story) as lost:
            await group.create(seed)
        assert lost.value.by_command
        await group.until_ready()
        await group.create()


async def test_a_command_that_takes_all_memory_of_the_host_is_blamed(model_dir, tmp_path):
    counter = tmp_path / "memory.events"
    counter.write_text("oom_kill 0\n")
    async with worker_group(model_dir, agents=[]) as group:
        group.agent(0, OomKills([counter]))
        await group.until_ready()
        hanging = asyncio.create_task(group.create(fake_worker.HANG))
        await asyncio.sleep(0.1)
        counter.write_text("oom_kill 1\n")
        os.kill(group.worker_pid(), signal.SIGKILL)
        with pytest.raises(WorkerLost, match=r"has no memory left.*during command 0") as lost:
            await hanging
        assert lost.value.by_command


@pytest.mark.parametrize("stopped", [pytest.param(0, marks=pytest.mark.slow), 1])
async def test_a_worker_that_is_stopped_is_noticed(model_dir, monkeypatch, stopped):
    """What a client hears names the group, too, where there are several."""
    monkeypatch.setattr(watchdog, "SILENT_SECONDS", SILENT_SECONDS)
    story = f"group teacher: worker {stopped} has given no sign of life for {SILENT_SECONDS:g} s"
    with log_groups.entered("teacher"):
        async with worker_group(model_dir, processes=2) as group:
            await group.until_ready()
            os.kill(group.worker_pid(stopped), signal.SIGSTOP)
            with pytest.raises(WorkerLost, match=story) as lost:
                await group.create()
            assert not lost.value.by_command
            await group.until_ready()
            await group.create()


async def test_a_command_past_its_deadline_ends_the_generation(model_dir):
    async with worker_group(model_dir, command_timeout=3.0) as group:
        await group.until_ready()
        with pytest.raises(
            WorkerLost, match=r"within --command-timeout 3 s \(worker 0 on .*\), during command 0"
        ):
            await group.create(fake_worker.HANG)
        await group.until_ready()
        await group.create()


async def test_workers_that_never_start_are_a_crash_loop_with_a_diagnosis(model_dir, monkeypatch):
    monkeypatch.setenv("FAKE_WORKER_FAILS_AT_START", "1")
    async with worker_group(model_dir) as group:
        with pytest.raises(
            CrashLoop, match=r"5 generations .* worker 0 on .* exited with code 7; .*no device found"
        ):
            await group.running
        assert group.counted == 5


async def test_workers_that_do_not_fit_end_the_start_at_once(model_dir, monkeypatch):
    monkeypatch.setenv("FAKE_WORKER_DOES_NOT_FIT", "1")
    async with worker_group(model_dir) as group:
        with pytest.raises(StartError, match=r"worker 0 on .* failed: the mesh needs 8 devices"):
            await group.running
        assert group.counted == 1


async def test_a_reason_counts_that_comes_after_the_news_of_the_exit(model_dir, monkeypatch):
    def take_late(self, identity, report):
        if isinstance(report, Failure):
            asyncio.get_running_loop().call_later(0.2, take, self, identity, report)
        else:
            take(self, identity, report)

    take = generations.Generations.take
    monkeypatch.setattr(generations.Generations, "take", take_late)
    monkeypatch.setenv("FAKE_WORKER_DOES_NOT_FIT", "1")
    async with worker_group(model_dir) as group:
        with pytest.raises(StartError, match=r"worker 0 on .* failed: the mesh needs 8 devices"):
            await group.running


async def test_a_command_that_is_finished_resets_the_count(model_dir):
    async with worker_group(model_dir) as group:
        for _ in range(6):
            await group.until_ready()
            await group.create()
            os.kill(group.worker_pid(), signal.SIGKILL)
        await group.until_ready()
        assert group.counted == 7


async def test_an_idle_loss_is_noticed_without_any_command(model_dir):
    async with worker_group(model_dir) as group:
        await group.until_ready()
        os.kill(group.worker_pid(), signal.SIGKILL)
        await group.until_ready()
        assert group.counted == 2


async def test_a_missing_agent_is_waited_for(model_dir):
    async with worker_group(model_dir, processes=2, agents=[0]) as group:
        while group.hub.busy != "waiting for the agent of worker 1":
            await asyncio.sleep(0.01)
        group.agent(1)
        await group.until_ready()
        assert group.hub.busy is None


async def test_an_agent_that_is_silent_has_lost_its_worker(model_dir, monkeypatch):
    monkeypatch.setattr(roster, "SILENT_SECONDS", SILENT_SECONDS)
    monkeypatch.setattr("spmd_tx.coordinator.agent.agent.BEAT_SECONDS", 0.2)
    async with worker_group(model_dir, processes=2) as group:
        await group.until_ready()
        monkeypatch.setattr(type(group.agents[1]._link), "send", lambda link, report: None)
        with pytest.raises(WorkerLost, match=f"has given no sign of life for {SILENT_SECONDS:g} s") as lost:
            await group.create(fake_worker.HANG)
        assert not lost.value.by_command
