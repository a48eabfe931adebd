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
    TinyEngine,
    engine_name,
    named_factors,
    random_adapters,
    random_datum,
    tiny_engine,
)

pytestmark = pytest.mark.usefixtures("quickly_compiled")

# What each of two processes does: it prints in which order it has a set of axes, and the program to add up an
# array that is split over two. Then it adds with the other one; a socket does not always take at once what is
# sent. The order of the sizes matters: with reduce-scatters 3 to 17 of 100 sums of 64 and of 256 KiB are
# wrong after these smaller ones.
PROCESS = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 1)
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from spmd_tx.sharding.collectives import gather, sum_over_shards, sum_scatter
from spmd_tx.sharding.mesh import FSDP, abstract_mesh, make_mesh

step = jax.shard_map(
    sum_over_shards, mesh=abstract_mesh(2, 1, 2), in_specs=P(("fsdp", "tp")), out_specs=P()
)
print([axis for axis in {"fsdp", "ep", "tp"} if axis != "ep"])
print(jax.make_jaxpr(step)(jax.ShapeDtypeStruct((4,), np.float32)))
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
        for _ in range(100):
            wrong = np.count_nonzero(np.asarray(step(x).addressable_data(0)) != wanted)
            assert wrong == 0, f"{wrong} of {part} sums are wrong"
"""

HASH_SEEDS = 0, 3  # of two processes that have the axes in different orders


@pytest.fixture(scope="module")
def two_processes():
    """What each has printed, and its errors."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(port), str(process)],
            env=os.environ | {"PYTHONHASHSEED": str(seed), "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process, seed in enumerate(HASH_SEEDS)
    ]
    try:
        said = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return [(process.returncode, *each) for process, each in zip(running, said, strict=True)]


def test_all_processes_sum_over_the_axes_in_the_same_order(two_processes):
    """Python gives every process its own order of a set of strings; programs must be equal all the same."""
    (one_order, *one), (other_order, *other) = (
        [line for line in said.splitlines() if "[Gloo]" not in line] for _, said, _ in two_processes
    )
    assert one_order != other_order
    assert one == other
    assert any("psum" in line for line in one)


def test_two_processes_bring_right_sums_every_time(two_processes):
    assert [status for status, *_ in two_processes] == [0, 0], [errors for *_, errors in two_processes]


ROWS = [(random_datum(row, row % 3, LENGTH),) for row in range(4)]
QUICK = ((2, 1, 4), "dense", False), ((2, 2, 2), "grouped", True)
ALL = [getattr(engine, "values", [engine])[0] for engine in ENGINES]
OTHERS = [engine for engine in ALL if engine not in QUICK]


@pytest.fixture(
    scope="module",
    params=[*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)],
    ids=engine_name,
)
def on_gloo(request):
    """An engine whose steps are made as for processes on CPUs."""
    shape, kind, split_base = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_is_gloo", lambda: True)
        yield TinyEngine(shape, np.float32, kind, split_base, "full")


def test_no_training_step_of_processes_on_cpus_has_a_reduce_scatter(on_gloo):
    w = on_gloo.place_adapters(random_adapters(0, on_gloo.model))
    step: Any = on_gloo._forward_backward
    program = step.lower(on_gloo.base, w, w, BOTH_SCALES, *on_gloo.batch(ROWS)).as_text()
    assert "reduce_scatter" not in program
    assert "all_to_all" in program or on_gloo.mesh.size == 1


@pytest.mark.parametrize(
    "on_gloo",
    [
        QUICK[0],
        pytest.param(((2, 2, 2), "mixture", True), marks=pytest.mark.slow),
    ],
    indirect=True,
    ids=engine_name,
)
def test_gradients_are_the_same_without_a_reduce_scatter(on_gloo):
    w = random_adapters(1, on_gloo.model)
    found = on_gloo.forward_backward(w, ROWS)
    wanted = tiny_engine(kind=on_gloo.kind).forward_backward(w, ROWS)
    for name, gradient in named_factors(wanted.grad_sum).items():
        np.testing.assert_allclose(
            named_factors(found.grad_sum)[name], gradient, rtol=0, atol=1e-5 * np.abs(gradient).max()
        )
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, rtol=0, atol=1e-5)
