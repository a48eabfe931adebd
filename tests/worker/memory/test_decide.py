"""When base weights are split over fsdp, and that decode then leaves them where they are."""

import re

import numpy as np
import pytest

from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.sharding.transfer import rows_to_devices
from spmd_tx.worker.memory import decide, host
from spmd_tx.worker.memory.sizes import Sizes
from spmd_tx.worker.programs.measurements import measure
from spmd_tx.worker.steps.decode_rows import DecodeRows
from tests.support.tiny_engine import BOTH_SCALES, MODEL, random_adapters, random_datum, tiny_engine
from tests.support.tiny_sampler import tiny_sampler
from tests.support.tiny_setup import tiny_setup

MESH = (4, 1, 2)


def sizes(mesh: tuple[int, int, int], wish: str) -> Sizes:
    axes = dict(zip(("fsdp", "ep", "tp"), mesh, strict=True))
    setup = tiny_setup(dtype="float32", shard_base_weights=wish, **axes)
    return Sizes(setup, MODEL, make_mesh(*mesh), np.float32)


@pytest.mark.parametrize(
    "wish, share, tried",
    [
        ("auto", 2.1, [False, True]),
        ("auto", 1.9, [True]),
        ("no", 1.0, [False]),
        ("yes", 100.0, [True]),
    ],
)
def test_weights_are_split_when_they_would_take_more_than_half(wish, share, tried):
    """``share``: the memory of a device, in weights; tp splits the matrices and not the norms."""
    server = sizes(MESH, wish)
    assert server.ways_to_split(int(share * server.base(splits=False))) == tried


def test_there_is_nothing_to_split_on_one_device():
    assert sizes((1, 1, 8), "yes").ways_to_split(1) == [False]


def test_a_device_of_a_host_may_use_a_part_of_its_memory(tmp_path, monkeypatch):
    whole = decide.of_host(1.0)
    assert decide.of_host(0.25).bytes == pytest.approx(whole.bytes / 4, rel=1e-6)
    limit, use = tmp_path / "memory.max", tmp_path / "memory.current"
    monkeypatch.setattr(host, "CGROUPS", [(limit, use)])
    limit.write_text("max\n")
    unlimited = decide.of_host(1.0).bytes
    assert whole.bytes <= unlimited
    limit.write_text(f"{2**28}\n")
    use.write_text(f"{2**27}\n")
    limited = decide.of_host(1.0)
    assert limited.bytes == int(0.6 * 2**28)
    assert limited.most_resident == int(0.8 * 2**27)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_accelerators_use_nearly_all_of_their_pool(monkeypatch, platform):
    planned = []
    monkeypatch.setattr(
        decide, "_memory_stats", lambda mesh: [{"bytes_limit": 2**32}, {"bytes_limit": 2**33}]
    )
    monkeypatch.setattr(decide, "platform", lambda mesh: platform)
    monkeypatch.setattr(decide, "measured_plan", lambda sizes, memory, *others: planned.append(memory))
    decide.plan_memory(tiny_setup(), MODEL, make_mesh(1, 1, 1), lambda words: None, measure)
    (memory,) = planned
    assert memory.platform == platform
    assert memory.bytes == int(0.96 * 2**32) // 2**20 * 2**20


def gathered(lowered) -> set[tuple[int, ...]]:
    """The shapes that all-gathers bring."""
    found = re.findall(r"all_gather.*?-> tensor<((?:\d+x)+)", lowered.as_text(), flags=re.DOTALL)
    return {tuple(map(int, shape.rstrip("x").split("x"))) for shape in found}


def test_training_gathers_split_weights_and_decode_does_not():
    engine = tiny_engine((8, 1, 1), split_base=True)
    kernels = {leaf.shape[1:] for leaf in (engine.base.layers.q, engine.base.layers.down)}
    placed = engine.place_adapters(random_adapters(1))
    batch = engine.batch([(random_datum(0, 0),)])
    assert kernels <= gathered(engine._forward.lower(engine.base, placed, BOTH_SCALES, *batch))

    sampler = tiny_sampler((8, 1, 1), split_base=True).reset()
    count = 8
    zeros = np.zeros(count, np.int32)
    rows = DecodeRows(
        *([zeros] * 5),
        seeds=np.zeros((count, 2), np.uint32),
        temperatures=np.ones(count, np.float32),
        top_k=zeros,
        top_p=np.ones(count, np.float32),
        stop_tokens=np.zeros((count, 8), np.int32),
    )
    placed_rows = rows_to_devices(sampler.mesh, (np.zeros((count, 8), np.int32), rows))
    state = (engine.base, sampler.bank, sampler.cache, sampler.rows, sampler.next_rows)
    brought = gathered(sampler._decode(0).lower(*state, *placed_rows, None, np.int32(0), np.int32(1)))
    assert brought
    assert all(np.prod(shape) <= count * MODEL.d_ff for shape in brought)
