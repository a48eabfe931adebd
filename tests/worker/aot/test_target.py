"""What programs are compiled for, as far as that can be seen without a compiler for it."""

from dataclasses import replace

import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from spmd_tx.errors import StartError
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.worker.aot.target import UNTRIED, answering_for, compiler_options, hosts_of, open_mesh
from spmd_tx.worker.memory.accelerators import ACCELERATORS, parse_devices
from spmd_tx.worker.xla_flags import wanted_flags
from tests.support.tiny_setup import tiny_setup


def test_gpus_are_compiled_for_with_the_flags_of_workers(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    setup = tiny_setup(fsdp=8)
    options = compiler_options(setup, parse_devices("8xh100", None))
    assert options["xla_gpu_exclude_nondeterministic_ops"] is True
    written = {f"--{name}={str(value).lower()}" for name, value in options.items() if name not in UNTRIED}
    assert written == {*wanted_flags(setup)}
    assert compiler_options(setup, parse_devices("v5e:2x4", None)) == {}
    assert (
        compiler_options(tiny_setup(fsdp=8, kernel_choices="/data"), parse_devices("8xh100", None)) == options
    )


def test_jax_is_told_of_the_gpu_that_is_not_there_and_then_no_longer():
    before = cudnn.check_compute_capability, cudnn.check_cudnn_version
    with answering_for(parse_devices("8xh100", None)):
        assert cudnn.check_compute_capability("8.0")
        assert cudnn.check_compute_capability("9.0")
        assert not cudnn.check_compute_capability("10.0")
        assert not cudnn.is_cuda_compute_capability_equal("10.3")
        assert cudnn.check_cudnn_version() > 90000
    assert (cudnn.check_compute_capability, cudnn.check_cudnn_version) == before


@pytest.mark.parametrize("devices, hosts", [("8xh100", [0] * 8), ("v5e:2x4", [0] * 8)])
def test_eight_gpus_and_the_chips_of_a_slice_are_near_each_other(devices, hosts):
    assert hosts_of(make_mesh(2, 1, 4), parse_devices(devices, None)) == hosts


def test_gpus_of_two_hosts_are_far_from_each_other(monkeypatch):
    mesh = make_mesh(2, 1, 4)
    devices = parse_devices("16xh100", None)
    monkeypatch.setitem(ACCELERATORS, "h100", replace(ACCELERATORS["h100"], per_host=4))
    assert hosts_of(mesh, devices) == [0, 0, 0, 0, 1, 1, 1, 1]


def test_part_of_a_host_is_refused_beside_a_whole_one():
    with pytest.raises(StartError, match="whole hosts of 8"):
        open_mesh(parse_devices("12xh100", None), 12, 1, 1)
