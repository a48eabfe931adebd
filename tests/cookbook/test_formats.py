"""An adapter has our logits in every form in which it is written, in transformers, PEFT and the cookbook."""

import json

import msgspec
import numpy as np
import pytest

from spmd_tx.cli.import_weights import lora_config
from spmd_tx.coordinator.checkpoints.foreign_adapter import convert
from spmd_tx.demo import tiny_model
from spmd_tx.exports.adapter_formats import export_adapter
from spmd_tx.exports.merged import export_merged
from spmd_tx.models.config import read_model_config
from spmd_tx.models.declared.layers import EXPERT_LORA
from spmd_tx.protocol.commands import AdapterSpec
from spmd_tx.sharding.mesh import make_mesh
from tests.cookbook.cookbook import HERE, PYTHON, run_python
from tests.golden import families
from tests.support.adapter_folders import write_folder
from tests.support.family_logits import logits

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(600)]

ADAPTER = AdapterSpec(rank=4, alpha=8.0)
CLOSE = 1e-4  # relative to the largest logit
# What libraries of today do not read: PEFT passes over names that it does not know, and takes modules of
# shared experts and dense layers for experts; the cookbook knows Qwen3.5 in its nested form alone
# (test_merge.py), and converts for servers other than transformers.
EXPERTS = {"glm4_moe", "glm4_moe_lite", "deepseek_v3", "gpt_oss", "qwen3_5_moe"}
UNREAD = {
    "own": {(family, layout) for family in EXPERTS for layout in EXPERT_LORA}
    | {("qwen3_moe", "shared-outer")},
    "build_hf_model": set(),
    "build_lora_adapter": {(family, layout) for family in EXPERTS for layout in EXPERT_LORA}
    | {("qwen3_moe", "per-expert")},  # whose ranks it does not write down
}
for form in UNREAD.values():
    form |= {(family, layout) for family in ("qwen3_5", "qwen3_5_moe") for layout in EXPERT_LORA}
LAYOUTS = [(family, "shared-outer") for family in families.CONFIGS]
LAYOUTS += [(family, "per-expert") for family in sorted(EXPERTS)]
LAYOUTS += [("qwen3_moe", layout) for layout in EXPERT_LORA]


@pytest.mark.parametrize("family, layout", LAYOUTS, ids=str)
def test_every_form_has_our_logits(tmp_path, environment, family, layout):
    path, tokens = tmp_path / "model", families.tokens(family)
    if family in families.CONFIGS:
        families.write(path, family, tie_word_embeddings=False)  # with tied ones the cookbook knows no head
    else:
        tiny_model.write(path, tiny_model.Spec(family=family, d_model=48, tied=False))
    folder = write_folder(tmp_path / "own", ADAPTER, read_model_config(path, layout), str(path))
    export_merged(folder, path, tmp_path / "merged", "float32")
    for form in ("peft", "tinker"):
        export_adapter(folder, path, tmp_path / form, form)
    given = {name: str(tmp_path / name) for name in ("model", "merged", "own", "peft", "tinker", "work")}
    given |= {"tokens": tokens.tolist(), "out": str(tmp_path / "out.npz")}
    run_python(environment, [PYTHON, str(HERE / "logits_of_forms.py"), json.dumps(given)])

    expected = logits(make_mesh(1, 1, 1), path, tokens, ADAPTER, folder, layout)
    base = logits(make_mesh(1, 1, 1), path, tokens)
    largest = np.abs(expected).max()
    assert np.abs(expected - base).max() > 0.01 * largest
    differ = {}
    for form, found in np.load(tmp_path / "out.npz").items():
        is_message = found.dtype.kind == "U"
        differ[form] = str(found) if is_message else f"{np.abs(found - expected).max() / largest:.1e}"
        is_equal = not is_message and np.abs(found - expected).max() <= CLOSE * largest
        assert is_equal or (family, layout) in UNREAD.get(form, ()), f"{form}: {differ[form]}"
    print(family, layout, differ)


EXPERT_PARAMETERS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


@pytest.mark.parametrize(
    "family, config",
    [
        ("llama", {"target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True}),
        ("glm4_moe", {"target_modules": ["q_proj", "v_proj"], **EXPERT_PARAMETERS}),
        ("gpt_oss", {"target_modules": ["q_proj", "v_proj"], **EXPERT_PARAMETERS}),
        ("qwen3_5", {"target_modules": ["q_proj", "v_proj", "in_proj_qkv"]}),
    ],
)
def test_an_adapter_of_peft_comes_in_with_its_logits(tmp_path, environment, family, config):
    path, tokens = families.write(tmp_path / "model", family), families.tokens(family)
    patterns = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 5.0}}
    config = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **patterns, **config}
    given = {"model": str(path), "adapter": str(tmp_path / "sent"), "config": config}
    given |= {"tokens": tokens.tolist(), "out": str(tmp_path / "out.npy")}
    run_python(environment, [PYTHON, str(HERE / "train_with_peft.py"), json.dumps(given)])

    model = read_model_config(path, "per-expert")
    announced = lora_config(tmp_path / "sent") | {"rank": 4 * model.expert_rank_divisor}
    place = tmp_path / "place"
    adapter = convert(tmp_path / "sent", place, msgspec.convert(announced, AdapterSpec), model, [str(path)])
    found = logits(make_mesh(1, 1, 1), path, tokens, adapter, place, "per-expert")
    expected = np.load(tmp_path / "out.npy")
    base = logits(make_mesh(1, 1, 1), path, tokens)
    largest = np.abs(expected).max()
    assert np.abs(expected - base).max() > 0.01 * largest
    np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE * largest)
