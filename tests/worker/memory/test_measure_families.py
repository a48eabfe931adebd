"""What is estimated of models with latents or states, beside what XLA says of the compiled programs."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from spmd_tx.models.declared.tower import Tower
from spmd_tx.models.families.registry import declare
from spmd_tx.protocol.kernels import references
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.worker.memory.plan import UsableMemory
from spmd_tx.worker.memory.refusal import make_plan
from spmd_tx.worker.memory.sizes import BatchShape, Sizes
from spmd_tx.worker.memory.steps import LEVELS
from spmd_tx.worker.programs.measurements import measure
from tests.golden import vision_cases
from tests.golden.families import CONFIGS
from tests.golden.vision_cases import D_MODEL
from tests.support.tiny_setup import tiny_setup

pytestmark = pytest.mark.slow

LARGER = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 384, "max_position_embeddings": 512}
MODELS = {
    "glm4_moe_lite": {"kv_lora_rank": 64, "q_lora_rank": 64, "moe_intermediate_size": 96},
    "qwen3_5": {"head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
}
SHAPE, DECODED = BatchShape(4, 256), BatchShape(16, 256)  # rows of decode, and tokens that each sees
STEPS = ("train full", "train light", "prefill", "continued prefill", "decode")
LEAST, MOST = 0.8, 2.2  # of what is needed: too small an estimate ends a worker, too large a one costs cache


@pytest.mark.parametrize("patches", [1024, 4096])
@pytest.mark.parametrize("deep", [(), (1, 3)])
def test_an_estimate_of_an_image_is_near_what_the_program_needs(patches, deep):
    raw = vision_cases.CONFIGS["qwen3_vl"]
    tower = Tower(depth=4, width=256, inner=1024, heads=4, side=48, out=D_MODEL, deep=deep)
    model = replace(declare(raw), tower=tower)
    setup = tiny_setup(dtype="float32", image_tokens=8192, max_context=1024, kernels=references("gpu"))
    plan = make_plan(Sizes(setup, model, make_mesh(1, 1, 1), jnp.float32), UsableMemory(2**31, "tpu"))
    assert LEAST < plan.steps.encode(patches) / measure(plan, "encode", BatchShape(1, patches)) < MOST


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("family", MODELS)
def test_an_estimate_is_near_what_the_program_needs(family, step):
    model = declare(CONFIGS[family] | LARGER | MODELS[family])
    level = step.removeprefix("train ")
    remat = level if level in LEVELS else "auto"
    setup = tiny_setup(
        dtype="float32",
        page_size=16,
        max_context=256,
        decode_rows=DECODED.rows,
        remat=remat,
        kernels=references("gpu"),  # those that are measured
    )
    plan = make_plan(Sizes(setup, model, make_mesh(1, 1, 1), jnp.float32), UsableMemory(2**30, "tpu"))
    shape = DECODED if step == "decode" else SHAPE
    if "prefill" in step:
        estimate = plan.steps.prefill(shape, plan.sizes.widest_table if step != "prefill" else 0)
    elif step == "decode":
        estimate = plan.steps.decode(*shape)
    else:
        estimate = plan.steps.train_with("", level, shape)
    assert LEAST < estimate / measure(plan, step, shape) < MOST
