import os
import socket
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from spmd_tx.sharding import collectives
from tests.support.tiny_engine import (
    BOTH_SCALES,
    ENGINES,
    LENGTH,
    MODELS,
    TinyEngine,
    engine_name,
    named_factors,
    random_adapters,
    random_datum,
    tiny_engine,
)

pytestmark = pytest.mark.usefixtures("quickly_compiled")

# What a worker would compile to add up an array that is split over two axes.
PROGRAM = """
import jax
jax.config.update("jax_num_cpu_devices", 4)
from jax.sharding import PartitionSpec as P
from spmd_tx.sharding.collectives import sum_over_shards
from spmd_tx.sharding.mesh import make_mesh
step = jax.shard_map(sum_over_shards, mesh=make_mesh(2, 1, 2), in_specs=P(("fsdp", "tp")), out_specs=P())
print([axis for axis in {"fsdp", "ep", "tp"} if axis != "ep"])
print(jax.make_jaxpr(step)(jax.numpy.zeros(4)))
"""

HASH_SEEDS = 0, 3  # of two processes that have the axes in different orders


def program(hash_seed: int) -> tuple[str, str]:
    """The order of a set of axes in a process, and the program."""
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed), "JAX_PLATFORMS": "cpu"}
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, check=True, capture_output=True, text=True
    ).stdout
    order, _, program = said.partition("\n")
    return order, program


def test_all_processes_sum_over_the_axes_in_the_same_order():
    """Python gives every process its own order of a set of strings; programs must be equal all the same."""
    (one_order, one), (other_order, other) = map(program, HASH_SEEDS)
    assert one_order != other_order
    assert one == other
    assert "psum" in one


# Sums over two processes, of which a socket does not always take at once what is sent. The order of the sizes
# matters: with reduce-scatters 10 to 50 of 300 sums of 64 and of 256 KiB were wrong after these smaller ones.
SUMS = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 1)
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from spmd_tx.sharding.collectives import gather, sum_scatter
from spmd_tx.sharding.mesh import FSDP, make_mesh
mesh = make_mesh(2, 1, 1)

def of_gather(x):
    return jax.vjp(lambda part: gather(part, FSDP, 0), x[: x.shape[0] // 2])[1](x)[0]

for sums in (lambda x: sum_scatter(x, FSDP, 0), of_gather):
    step = jax.jit(jax.shard_map(lambda x: sums(x[0]), mesh=mesh, in_specs=P(FSDP), out_specs=P(FSDP)))
    for kibibytes in (4, 32, 60, 64, 128, 256):
        part = kibibytes << 8  # float32
        numbers = np.random.default_rng(0).integers(0, 1000, (2, 2 * part)).astype(np.float32)
        x = jax.make_array_from_callback(numbers.shape, NamedSharding(mesh, P(FSDP)), lambda i: numbers[i])
        wanted = numbers.sum(axis=0)[jax.process_index() * part :][:part]
        for _ in range(300):
            wrong = np.count_nonzero(np.asarray(step(x).addressable_data(0)) != wanted)
            assert wrong == 0, f"{wrong} of {part} sums are wrong"
"""


def test_two_processes_bring_right_sums_every_time():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", SUMS, str(port), str(process)],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in (0, 1)
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert [process.returncode for process in running] == [0, 0], errors


@pytest.fixture
def on_gloo(monkeypatch):
    """Steps are made as for processes on CPUs."""
    monkeypatch.setattr(collectives, "_is_gloo", lambda: True)


ROWS = [(random_datum(row, row % 3, LENGTH),) for row in range(4)]


@pytest.mark.parametrize("engine", ENGINES, ids=engine_name)
def test_no_training_step_of_processes_on_cpus_has_a_reduce_scatter(engine, on_gloo):
    shape, kind, split_base = engine
    tiny = TinyEngine(shape, np.float32, kind, split_base, "full")
    w = tiny.place_adapters(random_adapters(0, tiny.model))
    step: Any = tiny._forward_backward
    program = step.lower(tiny.base, w, w, BOTH_SCALES, *tiny.batch(ROWS)).as_text()
    assert "reduce_scatter" not in program
    assert "all_to_all" in program or shape == (1, 1, 1)


@pytest.mark.parametrize(
    "engine",
    [
        ((2, 1, 4), "dense", False),
        pytest.param(((2, 2, 2), "mixture", True), marks=pytest.mark.slow),
    ],
    ids=engine_name,
)
def test_gradients_are_the_same_without_a_reduce_scatter(engine, on_gloo):
    shape, kind, split_base = engine
    w = random_adapters(1, MODELS[kind])
    found = TinyEngine(shape, np.float32, kind, split_base, "full").forward_backward(w, ROWS)
    wanted = tiny_engine(kind=kind).forward_backward(w, ROWS)
    for name, gradient in named_factors(wanted.grad_sum).items():
        np.testing.assert_allclose(
            named_factors(found.grad_sum)[name], gradient, rtol=0, atol=1e-5 * np.abs(gradient).max()
        )
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, rtol=0, atol=1e-5)
