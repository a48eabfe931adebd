import json
import sys

import pytest

from spmd_tx.coordinator.agent import devices
from spmd_tx.coordinator.agent.devices import CountedDevices, count_devices, restriction
from spmd_tx.errors import StartError


def child(monkeypatch, source):
    """What is run in place of JAX."""
    monkeypatch.setattr(devices, "COUNT", ("-c", source))


@pytest.fixture
def accelerators(tmp_path):
    (tmp_path / "nvidia0").touch()
    return tmp_path


async def test_without_drivers_nothing_is_asked_and_the_cpus_are_one_device(monkeypatch, tmp_path):
    child(monkeypatch, "raise SystemExit(1)")
    assert await count_devices({}, tmp_path) == CountedDevices("cpu", 1)


async def test_where_jax_is_to_use_cpus_accelerators_are_left_alone(monkeypatch, accelerators):
    child(monkeypatch, "raise SystemExit(1)")
    assert await count_devices({"JAX_PLATFORMS": "cpu"}, accelerators) == CountedDevices("cpu", 1)


async def test_a_platform_that_is_asked_for_and_is_not_there_is_named(monkeypatch, tmp_path):
    child(monkeypatch, "raise RuntimeError('no device found')")
    told = f"JAX_PLATFORMS is tpu, and {tmp_path} shows no GPU or TPU .RuntimeError: no device found.; give"
    with pytest.raises(StartError, match=told):
        await count_devices({"JAX_PLATFORMS": "tpu"}, tmp_path)


async def test_a_device_that_jax_alone_knows_is_counted_when_it_is_asked_for(monkeypatch, tmp_path):
    found = {"kind": "gpu", "count": 1, "bytes": 2**36}
    child(monkeypatch, f"print({json.dumps(found)!r})")
    assert await count_devices({"JAX_PLATFORMS": "cuda"}, tmp_path) == CountedDevices("gpu", 1, 2**36)


async def test_an_installed_plugin_without_devices_is_said(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(devices, "PLUGINS", ("json", "no_such_plugin"))
    assert await count_devices({}, tmp_path) == CountedDevices("cpu", 1)
    told = f"json is installed, and {tmp_path} shows no device for it: computing on CPUs"
    assert [each.message for each in caplog.records] == [told]


async def test_jax_counts_accelerators(monkeypatch, accelerators):
    found = {"kind": "gpu", "count": 8, "bytes": 2**36}
    child(monkeypatch, f"print('a library greets'); print({json.dumps(found)!r})")
    assert await count_devices({}, accelerators) == CountedDevices("gpu", 8, 2**36)


async def test_a_failure_of_jax_says_what_can_be_done(monkeypatch, accelerators):
    child(monkeypatch, "raise RuntimeError('no driver')")
    with pytest.raises(StartError, match="RuntimeError: no driver; repair that, or give all three"):
        await count_devices({}, accelerators)


async def test_the_real_child_counts_what_is_here():
    process = await devices.asyncio.create_subprocess_exec(
        sys.executable, *devices.COUNT, stdout=devices.asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    assert json.loads(said.splitlines()[-1])["count"] >= 1


def test_a_launcher_may_have_divided_the_devices():
    assert restriction({"CUDA_VISIBLE_DEVICES": "3"}) == "CUDA_VISIBLE_DEVICES=3"
    assert restriction({"CUDA_VISIBLE_DEVICES": "", "HOME": "/"}) == ""
