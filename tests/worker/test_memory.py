"""When base weights are split over fsdp, and that decode then leaves them where they are."""

import re

import numpy as np
import pytest

from spmd_tx.models import qwen3
from spmd_tx.protocol import Setup
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.sharding.transfer import rows_to_devices
from spmd_tx.worker import memory
from spmd_tx.worker.sample import DecodeRows
from tests.tiny_engine import BOTH_SCALES, MODEL, random_adapters, random_datum, tiny_engine
from tests.tiny_sampler import ALL_SLOTS, tiny_sampler
from tests.tiny_setup import tiny_setup

MESH = (4, 1, 2)


def setup(wish: str) -> Setup:
    mesh = dict(zip(("fsdp", "ep", "tp"), MESH, strict=True))
    return tiny_setup(dtype="float32", shard_base_weights=wish, **mesh)


def bytes_per_device() -> int:
    """What replicated weights take: tp splits the matrices and not the norms."""
    return memory._bytes_per_device(make_mesh(*MESH), qwen3.weights(MODEL, make_mesh(*MESH), np.float32))


@pytest.mark.parametrize(
    "wish, share, is_split",
    [
        ("auto", 2.1, False),
        ("auto", 1.9, True),
        ("no", 1.0, False),
        ("yes", 100.0, True),
        ("auto", None, False),
    ],
)
def test_weights_are_split_when_they_would_take_more_than_half(monkeypatch, wish, share, is_split):
    """``share``: the memory of a device, in weights; None where the platform does not tell."""
    stats = [] if share is None else [{"bytes_limit": int(share * bytes_per_device())}]
    monkeypatch.setattr(memory, "_memory_stats", lambda mesh: stats)
    assert memory.splits_base_weights(setup(wish), MODEL, make_mesh(*MESH)) == is_split


def test_there_is_nothing_to_split_on_one_device():
    assert not memory.splits_base_weights(setup("yes"), MODEL, make_mesh(1, 1, 8))


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
        tables=np.zeros((count, 8), np.int32),
    )
    placed_rows = rows_to_devices(sampler.mesh, rows)
    state = (engine.base, sampler.bank, sampler.cache, sampler.rows)
    brought = gathered(sampler._decode(0).lower(*state, placed_rows, ALL_SLOTS, np.int32(1)))
    assert brought
    assert all(np.prod(shape) <= count * MODEL.d_ff for shape in brought)
