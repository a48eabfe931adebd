"""What is estimated, beside what XLA says of the compiled programs."""

import jax.numpy as jnp
import pytest

from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.worker.memory.measure import measured_plan
from spmd_tx.worker.memory.plan import UsableMemory
from spmd_tx.worker.memory.refusal import make_plan
from spmd_tx.worker.memory.sizes import BatchShape, Sizes
from spmd_tx.worker.memory.steps import LEVELS, LOSS_KINDS
from spmd_tx.worker.programs.measurements import measure
from tests.support.model_shapes import resized
from tests.support.tiny_engine import MODEL
from tests.support.tiny_setup import tiny_setup

SMALL = resized(
    MODEL, d_model=128, d_ff=384, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, vocab_size=1024
)
SHAPES = {f"train {level}": BatchShape(4, 256) for level in LEVELS} | {
    **{f"train light{kind}": BatchShape(4, 256) for kind in LOSS_KINDS},
    "prefill": BatchShape(4, 256),
    "continued prefill": BatchShape(4, 256),
    "decode": BatchShape(4, 256),
}
QUICKLY = "continued prefill", "decode"
FACTOR = 1.6


def sizes(**different) -> Sizes:
    setup = tiny_setup(dtype="float32", page_size=16, max_context=256, **different)
    return Sizes(setup, SMALL, make_mesh(1, 1, 1), jnp.float32)


@pytest.mark.parametrize(
    "step", [step if step in QUICKLY else pytest.param(step, marks=pytest.mark.slow) for step in SHAPES]
)
def test_an_estimate_is_near_what_the_program_needs(step):
    level, *kind = step.removeprefix("train ").split(" ", 1)
    plan = make_plan(sizes(remat=level if level in LEVELS else "auto"), UsableMemory(2**30, "tpu"))
    shape = SHAPES[step]
    if "prefill" in step:
        estimate = plan.steps.prefill(shape, plan.sizes.widest_table if step != "prefill" else 0)
    elif step == "decode":
        estimate = plan.steps.decode(*shape)
    else:
        estimate = plan.steps.train_with("".join(f" {each}" for each in kind), level, shape)
    assert 1 / FACTOR < estimate / measure(plan, step, shape) < FACTOR


def test_a_plan_follows_what_was_measured():
    """Programs that need three times what was estimated leave less for others, and are measured once."""
    measured = []

    def measure_more(plan, step, shape):
        measured.append(step)
        return 3 * plan.worst()[step][1]

    memory = UsableMemory(2**28, "tpu")
    estimated = make_plan(sizes(), memory)
    plan = measured_plan(sizes(), memory, lambda message: None, lambda ratio: ratio, measure_more)
    assert len(measured) == len(set(measured)) >= 6
    kinds = {"prefill", "continued prefill", "decode", "of sequences", "of several targets"}
    assert all(any(step.endswith(kind) for step in measured) for kind in kinds)
    assert (plan.train_tokens, plan.pages) < (estimated.train_tokens, estimated.pages)
    assert all(needed <= plan.room for _, needed in plan.worst().values())
