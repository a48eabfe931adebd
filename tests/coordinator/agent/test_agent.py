import asyncio
import signal
from itertools import pairwise

import psutil
import pytest

from spmd_tx.coordinator.agent import agent
from spmd_tx.coordinator.mesh import generations, roster
from spmd_tx.errors import StartError, WorkerLost
from tests.coordinator.mesh import fake_worker
from tests.coordinator.mesh.worker_group import SECONDS, agent_process, worker_group, write_model
from tests.support.model_hub import ModelHub, lead_to, serving
from tests.support.ports import free_port
from tests.support.processes import until_ended


@pytest.fixture
def model_dir(tmp_path):
    return write_model(tmp_path / "model")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(generations, "FIRST_DELAY", 0.01)
    monkeypatch.setattr(generations, "EXPLANATION_SECONDS", 0.5)
    monkeypatch.setattr(generations, "TICK_SECONDS", 0.1)
    monkeypatch.setattr(agent, "RETRY_SECONDS", 0.1)


@pytest.fixture
async def remote(monkeypatch):
    """Starts agents in processes of their own, which may be killed."""
    started = []

    async def start(group, process, **options):
        started.append(await agent_process(group.port.local_address, process, **options))
        return started[-1]

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def outcome(process):
    """The exit code of a process, and what it said."""
    async with asyncio.timeout(SECONDS):
        _, said = await process.communicate()
    return process.returncode, said.decode()


async def children_of(process):
    while not (children := psutil.Process(process.pid).children()):
        await asyncio.sleep(0.01)
    return children


async def test_an_agent_ends_in_order_when_the_server_does(model_dir, remote):
    async with worker_group(model_dir, agents=[]) as group:
        process = await remote(group, 0)
        await group.until_ready()
        workers = await children_of(process)
        await group.generations.shut_down(patience=30)
        code, said = await outcome(process)
        assert code == 0, said
        assert "worker 0: worker 0 is ready" in said
        await asyncio.to_thread(until_ended, workers)


@pytest.mark.parametrize(
    "visible, expected", [(None, ["0", "1"]), ("0,1,2,3", ["0", "1"]), ("5", [None, None])]
)
async def test_workers_of_a_host_divide_its_devices_unless_a_launcher_has(
    model_dir, monkeypatch, visible, expected
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    async with worker_group(model_dir, processes=2) as group:
        await group.until_ready()
        commands = [psutil.Process(group.worker_pid(agent)).cmdline() for agent in range(2)]
    options = [dict(pairwise(command)) for command in commands]
    assert [each.get("--device-ids") for each in options] == expected


async def test_an_agent_with_another_secret_is_refused_and_says_so(model_dir, monkeypatch):
    monkeypatch.setattr(agent, "REJECTED_SECONDS", 0.5)
    async with worker_group(model_dir, agents=[]) as group:
        stranger = group.agent(0, secret="another secret")
        with pytest.raises(
            StartError, match=r"refuses the connection: the secrets differ, .* same --secret-file"
        ):
            await stranger
        assert group.roster.absent() == [0]


async def test_an_agent_of_another_protocol_is_refused_and_says_so(model_dir, monkeypatch):
    monkeypatch.setattr(roster, "PROTOCOL_VERSION", 99)
    async with worker_group(model_dir) as group:
        with pytest.raises(
            StartError, match=r"speaks protocol \d+ and the server 99; install the same version"
        ):
            await group.tasks[-1]


async def test_an_agent_with_another_model_says_which_file_differs_and_another_one_is_waited_for(
    model_dir, tmp_path, caplog
):
    other = write_model(tmp_path / "other", weights="other weights")
    async with worker_group(model_dir, agents=[]) as group:
        wrong = group.agent(0, base_model=str(other))
        story = (
            r"other holds another base model .* model.safetensors is \w+ of 13 bytes here and \w+ of 7 bytes"
        )
        with pytest.raises(StartError, match=story):
            await wrong
        group.agent(0)
        await group.until_ready()
    assert "the agent of worker 0 on" in caplog.text
    assert "has left: " in caplog.text


async def test_an_agent_takes_the_servers_revision_of_its_own_copy(model_dir, tmp_path, monkeypatch):
    with serving(ModelHub()) as hub:
        lead_to(hub, monkeypatch, tmp_path / "cache")
        commit = hub.push("owner/name", model_dir)
        hub.push("owner/name", write_model(tmp_path / "newer", weights="newer weights"))
        async with worker_group(model_dir, agents=[], revision=commit) as group:
            group.agent(0, base_model="owner/name")
            await group.until_ready()
            command = psutil.Process(group.worker_pid()).cmdline()
            assert dict(pairwise(command))["--model-dir"].endswith(f"snapshots/{commit}")
        async with worker_group(model_dir, agents=[], revision=commit) as group:
            group.agent(0, base_model=str(model_dir))
            await group.until_ready()


@pytest.mark.parametrize(
    "process, options, message",
    [
        (0, {"devices": 4}, "--devices is 4, but each process of the mesh has 1"),
        (1, {}, "--process-id is 1, but the mesh has processes 0 to 0"),
    ],
)
async def test_an_agent_that_does_not_fit_the_mesh_is_refused_and_says_why(
    model_dir, process, options, message
):
    async with worker_group(model_dir, agents=[]) as group:
        with pytest.raises(StartError, match=message):
            await group.agent(process, **options)


async def test_a_second_agent_of_a_worker_waits_for_the_end_of_the_first(model_dir):
    async with worker_group(model_dir) as group:
        await group.until_ready()
        second = group.agent(0)
        await asyncio.sleep(0.5)
        assert await group.create()
        group.tasks[3].cancel()
        await group.until_ready()
        assert await group.create()
        assert not second.done()


async def test_a_killed_agent_takes_its_worker_along_and_its_successor_joins(model_dir, remote):
    async with worker_group(model_dir, processes=2, agents=[0]) as group:
        first = await remote(group, 1)
        await group.until_ready()
        workers = await children_of(first)
        hanging = asyncio.create_task(group.create(fake_worker.HANG))
        await asyncio.sleep(0.1)
        first.kill()
        with pytest.raises(WorkerLost) as lost:
            await hanging
        # Whichever is seen first: the connection that is gone, or the worker that died with its agent.
        assert "agent of worker 1 on" in str(lost.value)
        assert not lost.value.by_command
        await asyncio.to_thread(until_ended, workers)
        await remote(group, 1)
        await group.until_ready()
        await group.create()


async def test_agents_rejoin_a_coordinator_that_was_restarted(model_dir, remote):
    port = free_port()
    async with worker_group(model_dir, agents=[], port=port) as group:
        process = await remote(group, 0)
        await group.until_ready()
        workers = await children_of(process)
    await asyncio.to_thread(until_ended, workers)
    async with worker_group(model_dir, agents=[], port=port, first_generation=2) as group:
        await group.until_ready()
        await group.create()
        assert (await children_of(process))[0].pid != workers[0].pid
        await group.generations.shut_down(patience=30)
        assert (await outcome(process))[0] == 0


async def test_an_agent_gives_up_a_coordinator_that_is_never_there(model_dir, remote):
    port = free_port()
    process = await agent_process(f"127.0.0.1:{port}", 0, patience=0.3)
    code, said = await outcome(process)
    assert code == 2
    assert f"no coordinator at 127.0.0.1:{port} for 0.3 s; start it, or check --coordinator" in said


async def test_an_agent_that_is_terminated_ends_its_worker(model_dir, remote):
    async with worker_group(model_dir, agents=[]) as group:
        process = await remote(group, 0)
        await group.until_ready()
        workers = await children_of(process)
        process.send_signal(signal.SIGTERM)
        assert (await outcome(process))[0] == 0
        await asyncio.to_thread(until_ended, workers)


async def test_an_address_that_is_none_is_refused(model_dir):
    code, said = await outcome(await agent_process("node-a", 0))
    assert (code, said) == (2, "spmd-tx: --coordinator is 'node-a'; it must be HOST:PORT\n")
