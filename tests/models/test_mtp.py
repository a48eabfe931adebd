"""The layer that makes drafts computes what the DeepSeek-V3 report says, on every mesh."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.models.base_weights import weights
from spmd_tx.models.families.registry import declare
from spmd_tx.sharding.mesh import abstract_mesh, make_mesh
from tests.golden.families import CONFIGS, LENGTH, tokens
from tests.support.family_logits import logits
from tests.support.mtp_models import FAMILIES, SAYS, expected_logits, write_with_mtp
from tests.support.tiny_engine import mesh_name

pytestmark = pytest.mark.usefixtures("quickly_compiled")

CLOSE = 2e-4
QUICK = ("deepseek_v3", (2, 2, 2)), ("qwen3_5", (1, 1, 1))


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        pytest.param(
            *each, id=f"{each[0]}-{mesh_name(each[1])}", marks=() if each in QUICK else pytest.mark.slow
        )
        for each in itertools.product(FAMILIES, [(1, 1, 1), (2, 2, 2)])
    ],
)
def test_logits_are_those_of_the_report(family, shape, tmp_path):
    path, text = write_with_mtp(tmp_path, family), tokens(family)
    expected = expected_logits(path, text)
    found = logits(make_mesh(*shape), path, text, speculation="mtp")[: LENGTH - 1]
    np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE)


def stored_names(family, **keys):
    model = declare(CONFIGS[family] | keys, drafts=True)
    declared = weights(model, abstract_mesh(1, 1, 1), jnp.float32).mtp
    return set() if declared is None else {declared[name].hf_name for name in declared}


@pytest.mark.parametrize(
    ("family", "names"),
    [
        (
            "deepseek_v3",
            ("enorm", "hnorm", "eh_proj", "shared_head.norm", "self_attn.kv_b_proj", "input_layernorm"),
        ),
        ("glm4_moe", ("enorm", "self_attn.q_proj", "mlp.experts.{expert}.up_proj", "mlp.gate")),
    ],
)
def test_the_names_of_tensors_are_those_behind_the_last_layer(family, names):
    found = stored_names(family, num_nextn_predict_layers=1)
    assert {f"model.layers.3.{name}.weight" for name in names} <= found
    assert all(name.startswith("model.layers.3.") for name in found)
    assert "model.layers.3.mlp.gate.e_score_correction_bias" in found
    assert not stored_names(family)


def test_the_names_of_tensors_of_qwen3_5():
    around = {f"mtp.{name}.weight" for name in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    found = stored_names("qwen3_5", **SAYS)
    assert around < found
    assert all(name.startswith("mtp.layers.0.") for name in found - around)
    assert "mtp.layers.0.self_attn.q_norm.weight" in found
    assert "mtp.layers.0.mlp.experts.gate_up_proj" in stored_names("qwen3_5_moe", **SAYS)
    assert not stored_names("qwen3_5")
    assert not stored_names("qwen3_5", **SAYS, mtp_use_dedicated_embeddings=True)
