"""What is asked for before anything is compiled."""

import pytest

from spmd_tx.errors import StartError
from spmd_tx.worker.aot import environment
from spmd_tx.worker.aot.gpu_targets import CHIPS, target_of
from spmd_tx.worker.memory.accelerators import ACCELERATORS, parse_devices


@pytest.mark.parametrize(
    "devices, words",
    [
        ("8xl4", r"does not know l4; it knows .*h100.*v5e"),
        ("8xcpu", "does not know cpu"),
        ("8xv5e", "v5e:2x4"),
    ],
)
def test_devices_that_cannot_be_compiled_for_are_refused(devices, words):
    with pytest.raises(StartError, match=words):
        environment.check(parse_devices(devices, None))


@pytest.mark.parametrize("devices, extra", [("8xh100", "aot-cuda"), ("v5e:2x4", "aot-tpu")])
def test_a_missing_compiler_is_told_with_what_installs_it(devices, extra, monkeypatch):
    monkeypatch.setattr(environment, "find_spec", lambda module: None)
    with pytest.raises(StartError, match=rf"pip install 'spmd_tx\[{extra}\]'"):
        environment.check(parse_devices(devices, None))


def test_jax_must_look_for_no_devices(monkeypatch):
    monkeypatch.setattr(environment.os, "environ", {"TPU_WORKER_ID": "3"})
    environment.prepare(parse_devices("v5p:2x2x2", None))
    told = environment.os.environ
    assert told["JAX_PLATFORMS"] == "cpu"
    assert told["TPU_ACCELERATOR_TYPE"] == "v5p-16"
    assert told["TPU_WORKER_ID"] == "3", "what is set stays"


@pytest.mark.parametrize("kind", CHIPS)
def test_a_gpu_is_described_by_its_own_figures(kind):
    text = target_of(kind)
    assert f"memory_bandwidth: {int(ACCELERATORS[kind].bandwidth)}" in text
    assert text.count("{") == text.count("}")


def test_every_gpu_with_figures_is_described():
    assert {name for name, each in ACCELERATORS.items() if each.flops and each.platform == "gpu"} == {*CHIPS}
