"""The plan of a model whose layers keep states: rows have one each, and snapshots a budget."""

import jax.numpy as jnp
import pytest

from spmd_tx.models.families import qwen3_5
from spmd_tx.models.families.keys import ConfigKeys
from spmd_tx.sharding.mesh import abstract_mesh
from spmd_tx.worker.memory.plan import UsableMemory, report
from spmd_tx.worker.memory.refusal import make_plan, splits_evenly
from spmd_tx.worker.memory.sizes import Sizes
from tests.golden.delta_model import CONFIG, TEXT
from tests.support.tiny_setup import tiny_setup

LARGE = {  # as Qwen3.5-9B
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "layer_types": None,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 248_320,
}
MODEL = qwen3_5.dense(ConfigKeys({**CONFIG, "text_config": {**TEXT, **LARGE}}))
STATE = 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)  # bytes: of 24 layers, heads in fp32 and inputs in bf16
GIB = 2**30


def sizes(tp=1, **different) -> Sizes:
    usual = {"max_context": 2048, "decode_rows": 64, "decode_steps": 16, "page_size": 16}
    return Sizes(tiny_setup(tp=tp, **usual | different), MODEL, abstract_mesh(1, 1, tp), jnp.bfloat16)


def test_a_plan_has_slots_for_rows_and_as_many_snapshots():
    plan = make_plan(sizes(), UsableMemory(80 * GIB, "tpu"))
    assert (plan.decode_rows, plan.state_slots, plan.states) == (64, 129, 129 * STATE)
    shown = report(plan)
    held = shown.base_bytes + shown.adapter_bytes + shown.bank_bytes + shown.cache_bytes + shown.state_bytes
    assert held + shown.step_bytes == 80 * GIB


@pytest.mark.parametrize("budget, slots", [(0, 65), (10 * STATE + 1, 75)])
def test_the_budget_is_for_snapshots(budget, slots):
    assert make_plan(sizes(state_cache_bytes=budget), UsableMemory(80 * GIB, "tpu")).state_slots == slots


def test_tp_splits_states_by_heads_of_keys():
    assert sizes(tp=4).state == STATE // 4
    assert [tp for tp in (2, 4, 8, 16, 32) if splits_evenly(MODEL, tp)] == [2, 4, 8, 16]
