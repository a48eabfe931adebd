"""Eight tenants in one micro-batch: the losses, gradients and weights of each, bit for bit as alone."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from spmd_tx.coordinator.training.attention_cost import AttentionCost
from spmd_tx.coordinator.training.batching import pack
from spmd_tx.coordinator.training.losses import LossSettings
from spmd_tx.coordinator.training.micro_batch import MicroBatch
from spmd_tx.coordinator.training.packing import TrainingShapes
from spmd_tx.coordinator.wire.training_protobuf import Datum
from spmd_tx.demo import tiny_model
from spmd_tx.protocol.commands import (
    LOSS_NAMES,
    AdapterSpec,
    Forward,
    ForwardBackward,
    OptimStep,
)
from spmd_tx.worker.engine import Engine
from spmd_tx.worker.programs.compiled import Programs
from tests.support import moves
from tests.support.tiny_engine import to_numpy
from tests.support.tiny_setup import tiny_setup

SPEC = tiny_model.Spec(n_layers=2, n_kv_heads=2, vocab_size=272)
MIXTURE = replace(SPEC, d_ff=32, n_experts=8)
TENANTS, ROWS, LENGTH = 8, 4, 128
RANKS = [1, 2, 4, 8]
LOSSES = ["cross_entropy", "importance_sampling", "ppo", "cispo"]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(((1, 1, 1), SPEC), marks=pytest.mark.slow),
        ((2, 1, 2), SPEC),
        pytest.param(((4, 1, 1), SPEC), marks=pytest.mark.slow),
        pytest.param(((2, 2, 1), MIXTURE), marks=pytest.mark.slow),
    ],
    ids=["one", "two", "four", "mixture"],
)
def engine(request, tmp_path_factory):
    (fsdp, ep, tp), spec = request.param
    directory = tmp_path_factory.mktemp("tenants")
    setup = tiny_setup(
        model_dir=str(tiny_model.write(directory / "model", spec)),
        dtype="float32",
        fsdp=fsdp,
        ep=ep,
        tp=tp,
        adapter_slots=TENANTS,
        max_rank=8,
        max_context=LENGTH,
        kv_cache_tokens=256,
        decode_rows=4,
        compilation_cache="",
        idle_adapters=str(directory / "idle"),
    )
    return Engine.start(setup, Programs(lambda _: None), lambda _: None)


def shapes_of(engine: Engine) -> TrainingShapes:
    """As on CPUs."""
    shards, plan = engine.setup.fsdp * engine.setup.ep, engine.plan
    return TrainingShapes(
        shards, plan.train_tokens, plan.block_tokens, LENGTH, AttentionCost(5e-4), engine.setup.ep
    )


def datum(slot: int, row: int) -> Datum:
    random = np.random.default_rng([slot, row])
    tokens = random.integers(0, SPEC.vocab_size, LENGTH + 1)
    floats = random.normal(size=(2, LENGTH)).astype(np.float32)
    inputs = {"target_tokens": tokens[1:]}
    if LOSSES[slot % 4] == "cross_entropy":
        inputs["weights"] = floats[0]
    else:
        inputs |= {"logprobs": floats[0] - 5, "advantages": floats[1]}
    return Datum(tokens=tokens[:-1].astype(np.int32), loss_inputs=inputs)


def chunk_of(slot: int, shapes: TrainingShapes, rows: int, forward_only: bool = False):
    loss = LossSettings(LOSS_NAMES.index(LOSSES[slot % 4]), clip_low=0.8, clip_high=1.2)
    packed = pack([datum(slot, row) for row in range(rows)], loss, forward_only, shapes)
    (chunk,) = packed.chunks
    return chunk.in_slot(slot)


def run(engine: Engine, batch: MicroBatch) -> dict[int, list[bytes]]:
    """What each slot gets of the reply."""
    make = Forward if batch.chunks[0].forward_only else ForwardBackward
    arrays, _ = engine.execute(make(rows=batch.rows(), loss=batch.loss(), block=batch.rows_of_shard))
    outputs = batch.cut(*(np.asarray(arrays[name]) for name in ("logprobs", "losses")))
    return {
        chunk.slot: [output.logprobs.tobytes(), output.losses.tobytes()]
        for chunk, output in zip(batch.chunks, outputs, strict=True)
    }


def trained(engine: Engine, counts: list[int], *, together: bool):
    """The replies to two steps of every tenant and a forward pass, and then its state and gradient."""
    shapes, replies = shapes_of(engine), []
    for slot in range(TENANTS):
        adapter = AdapterSpec(rank=RANKS[slot // 2])
        engine.execute(moves.create_adapter(slot, slot, adapter))
    for forward_only in (False, False, True, False):
        chunks = [chunk_of(slot, shapes, rows, forward_only) for slot, rows in enumerate(counts)]
        batches = [MicroBatch(chunks[0], shapes)] if together else [MicroBatch(c, shapes) for c in chunks]
        for chunk in chunks[1:] if together else ():
            assert batches[0].join(chunk)
        replies.append({slot: reply for batch in batches for slot, reply in run(engine, batch).items()})
        for slot in range(TENANTS if len(replies) < 3 else 0):
            engine.execute(
                OptimStep(
                    slot=slot,
                    learning_rate=0.01,
                    beta1=0.9,
                    beta2=0.95,
                    eps=1e-12,
                    weight_decay=0.0,
                    grad_clip_norm=0.0,
                )
            )
    return replies, to_numpy(engine.state.train)


@pytest.mark.slow
@pytest.mark.parametrize("counts", [[ROWS] * TENANTS, [1, 4, 3, 1, 2, 5, 1, 1]], ids=["equal", "mixed"])
def test_company_changes_no_bit_of_any_tenant(engine, counts):
    replies, state = trained(engine, counts, together=False)
    shared_replies, shared_state = trained(engine, counts, together=True)
    assert shared_replies == replies
    for name in ("w", "mu", "nu", "grad_sum"):
        alone, shared = (jax.tree.leaves(getattr(each, name)) for each in (state, shared_state))
        for one, other in zip(alone, shared, strict=True):
            assert all(np.any(one[..., slot, :, :]) for slot in range(TENANTS))
            assert np.array_equal(one, other), name
