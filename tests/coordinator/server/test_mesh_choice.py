import pytest

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.mesh.roster import HostDevices
from spmd_tx.coordinator.server.mesh_choice import MeshChoice, devices_of_each
from spmd_tx.demo import tiny_model
from spmd_tx.errors import StartError
from spmd_tx.protocol.agents import DevicesFound

GIB = 2**30


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("model"), tiny_model.PRESETS["tiny-moe"])


def devices(host="node-a", count=8, kind="gpu", wanted=None, visible="", size=80 * GIB):
    return HostDevices(
        host, DevicesFound(process=0, kind=kind, count=count, bytes=size, visible=visible), wanted
    )


def config(**options):
    return ServerConfig(base_model="m", **options)


CPUS = devices(kind="cpu", count=1, size=None)


@pytest.mark.parametrize(
    "options, found, expected",
    [
        ({}, [devices()], 8),
        ({"num_processes": 2}, [devices(), devices("node-b")], 8),
        ({"num_processes": 2}, [devices(), devices()], 4),
        ({"num_processes": 2}, [devices(count=1, visible="0"), devices(count=1, visible="1")], 1),
        ({"num_processes": 2}, [devices(wanted=2), devices("node-b", wanted=2)], 2),
        ({"num_processes": 2, "worker_devices": 3}, [devices(), devices("node-b", wanted=3)], 3),
        ({"worker_devices": 3}, [CPUS], 3),
        ({}, [CPUS], 1),
        ({"num_processes": 2}, [CPUS, CPUS], 1),
        ({"num_processes": 2, "tensor_parallel_size": 4}, [CPUS, CPUS], 2),
        ({"num_processes": 2, "tensor_parallel_size": 3}, [CPUS, CPUS], 3),
    ],
)
def test_the_devices_of_a_host_are_divided_among_its_processes(options, found, expected):
    assert devices_of_each(config(**options), found) == expected


@pytest.mark.parametrize(
    "found, message",
    [
        ([devices(), devices("node-b", count=4)], "worker 0 on node-a: 8, worker 1 on node-b: 4"),
        ([devices(), devices("node-b", wanted=4)], "worker 0 on node-a: 8, worker 1 on node-b: 4"),
        ([devices(count=3), devices(count=3)], "node-a has 3 devices, which 2 processes cannot divide"),
    ],
)
def test_processes_with_unequal_devices_are_refused(found, message):
    with pytest.raises(StartError, match=message):
        devices_of_each(config(num_processes=2), found)


def sizes(fsdp, ep, tp):
    """All sizes as options: with these, no process has to plan."""
    return {
        "fully_sharded_data_parallel_size": fsdp,
        "expert_parallel_size": ep,
        "tensor_parallel_size": tp,
    }


async def settled(model_dir, data_dir, found, **options):
    choice = MeshChoice(config(data_dir=data_dir, **options), model_dir)
    await choice.settle(found)
    return choice.config.mesh


@pytest.mark.parametrize(
    "options, mesh",
    [
        ({"expert_parallel_size": 2, "tensor_parallel_size": 2}, (2, 2, 2)),
        *(  # each plan is a process; the choice itself is that of tests/cli/test_plan.py
            pytest.param(options, mesh, marks=pytest.mark.slow)
            for options, mesh in [
                ({}, (1, 8, 1)),  # the tiny mixture has eight experts
                ({"fully_sharded_data_parallel_size": 4}, (4, 2, 1)),
                ({"expert_parallel_size": 1}, (8, 1, 1)),
            ]
        ),
    ],
)
async def test_sizes_that_are_given_are_kept_and_all_devices_are_used(model_dir, tmp_path, options, mesh):
    assert await settled(model_dir, tmp_path, [devices()], **options) == mesh


async def test_sizes_that_no_mesh_of_these_devices_has_are_refused(model_dir, tmp_path):
    with pytest.raises(StartError, match="--tensor-parallel-size 3 cannot have 8 devices"):
        await settled(model_dir, tmp_path, [devices()], tensor_parallel_size=3)


async def test_the_mesh_of_a_data_directory_stays_until_devices_or_sizes_change(model_dir, tmp_path, caplog):
    assert await settled(model_dir, tmp_path, [devices()], **sizes(2, 2, 2)) == (2, 2, 2)
    assert await settled(model_dir, tmp_path, [devices()]) == (2, 2, 2)
    assert "last start" not in caplog.text
    assert await settled(model_dir, tmp_path, [devices(count=4)], expert_parallel_size=4) == (1, 4, 1)
    assert "fsdp 2 x ep 2 x tp 2 at the last start and is fsdp 1 x ep 4 x tp 1 now" in caplog.text
    assert await settled(model_dir, tmp_path, [devices(count=4)]) == (1, 4, 1)
    assert await settled(model_dir, tmp_path, [devices(count=4)], tensor_parallel_size=4) == (1, 1, 4)


async def test_a_mesh_that_was_chosen_to_sample_is_not_that_of_training(model_dir, tmp_path, caplog):
    assert await settled(model_dir, tmp_path, [devices()], **sizes(2, 2, 2)) == (2, 2, 2)
    chosen = await settled(model_dir, tmp_path, [devices()], role="sample", tensor_parallel_size=8)
    assert chosen == (1, 1, 8)
    assert await settled(model_dir, tmp_path, [devices()], role="sample") == chosen
    assert await settled(model_dir, tmp_path, [devices()]) == (2, 2, 2)
    assert "last start" not in caplog.text


def test_a_mesh_that_is_given_is_remembered_too(model_dir, tmp_path, caplog):
    for mesh in ((1, 1, 2), (2, 1, 1)):
        MeshChoice(config(data_dir=tmp_path, **sizes(*mesh)), model_dir)
    assert "fsdp 1 x ep 1 x tp 2 at the last start and is fsdp 2 x ep 1 x tp 1 now" in caplog.text


async def test_a_damaged_record_is_replaced(model_dir, tmp_path):
    (tmp_path / "mesh.json").write_text("{")
    assert await settled(model_dir, tmp_path, [CPUS]) == (1, 1, 1)
    assert await settled(model_dir, tmp_path, [CPUS]) == (1, 1, 1)
