"""Folders from elsewhere are exported as what they mean, and refused ones leave nothing."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from spmd_tx.cli.main import app
from spmd_tx.errors import StartError
from spmd_tx.exports.adapter import base_model_of
from spmd_tx.exports.adapter_formats import export_adapter
from spmd_tx.exports.merged import export_merged
from spmd_tx.models.checkpoint.files import SINGLE_FILE
from spmd_tx.models.config import read_model_config
from spmd_tx.protocol.commands import AdapterSpec
from tests.golden import families
from tests.support.adapter_folders import write_folder

ADAPTER = AdapterSpec(rank=6, alpha=12.0)
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."


def write(tmp_path, family="llama", layout="shared-outer"):
    path = families.write(tmp_path / "model", family, tie_word_embeddings=False)
    return path, write_folder(tmp_path / "adapter", ADAPTER, read_model_config(path, layout), "tiny")


def change(folder, tensors=lambda tensors: tensors, **fields):
    config = json.loads((folder / CONFIG).read_bytes())
    (folder / CONFIG).write_text(json.dumps(config | fields))
    save_file(tensors(load_file(folder / WEIGHTS)), folder / WEIGHTS)


def only(part):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if re.search(part, name)}


def merged(tmp_path, folder, path, name):
    export_merged(folder, path, tmp_path / name, "float32")
    return load_file(tmp_path / name / SINGLE_FILE)


def check_delta(folder, path, result, scales):
    """What is added to each tensor is the product of its factors; the others are as they were."""
    base, factors, seen = load_file(path / SINGLE_FILE), load_file(folder / WEIGHTS), set()
    for name, tensor in result.items():
        at = f"{PREFIX}{name.removesuffix('.weight')}.lora_"
        expected = base[name]
        if f"{at}A.weight" in factors:
            scale = next(scale for part, scale in scales.items() if re.search(part, name))
            expected = expected + scale * factors[f"{at}B.weight"] @ factors[f"{at}A.weight"]
            seen.add(at)
        np.testing.assert_allclose(tensor, expected, rtol=0, atol=2e-6, err_msg=name)
    assert len(seen) == len(factors) // 2


@pytest.mark.parametrize(
    "fields, part",
    [
        ({"target_modules": ["q_proj", "v_proj"]}, "[qv]_proj"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1]}, "layers.1.*q_proj"),
        ({"target_modules": r".*layers\.(0|2)\..*_proj"}, r"layers\.[02]\..*_proj"),
    ],
)
@pytest.mark.parametrize("form", ["peft", "tinker"])
def test_modules_without_factors_stay_as_they_are(tmp_path, fields, part, form):
    path, folder = write(tmp_path)
    change(folder, only(part), **fields)
    result = merged(tmp_path, folder, path, "merged")
    check_delta(folder, path, result, {"": 2.0})
    export_adapter(folder, path, tmp_path / form, form)
    again = merged(tmp_path, tmp_path / form, path, "again")
    for name, tensor in result.items():
        np.testing.assert_allclose(again[name], tensor, rtol=0, atol=1e-6, err_msg=name)


def cut(tensors):
    for name in [name for name in tensors if "q_proj" in name]:
        tensors[name] = (tensors[name][:2] if ".lora_A" in name else tensors[name][:, :2]).copy()
    return tensors


def test_ranks_and_alphas_of_modules_are_those_of_their_patterns(tmp_path):
    path, folder = write(tmp_path)
    alphas = {r"^model\.layers\.(0|1)\.self_attn\.k_proj": 3.0, r"layers.2.self_attn.\w_proj": 24.0}
    change(folder, cut, rank_pattern={"q_proj": 2}, alpha_pattern=alphas)
    scales = {
        "2.self_attn.q": 24 / 2,
        "q_proj": 12 / 2,
        "2.self_attn": 24 / 6,
        "[01].self_attn.k": 3 / 6,
        "": 2,
    }
    check_delta(folder, path, merged(tmp_path, folder, path, "merged"), scales | {"": 2})


def test_a_rank_above_the_adapters_is_taken(tmp_path):
    path, folder = write(tmp_path)
    change(folder, r=3, lora_alpha=6.0, rank_pattern={r".*": 6}, alpha_pattern={r".*": 12.0})
    check_delta(folder, path, merged(tmp_path, folder, path, "merged"), {"": 2.0})


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize("form", ["peft", "tinker", "merged"])
def test_experts_of_the_rank_of_all_modules_are_taken(tmp_path, family, form):
    """PEFT gave each expert of transformers 4 the adapter's rank."""
    path, folder = write(tmp_path, family, "per-expert")

    def widen(tensors):
        random = np.random.default_rng(0)
        for name, tensor in tensors.items():
            if ".experts." in name:
                shape = (6, tensor.shape[1]) if ".lora_A" in name else (tensor.shape[0], 6)
                tensors[name] = 0.1 * random.standard_normal(shape).astype(np.float32)
        return tensors

    change(folder, widen, rank_pattern={})
    result = merged(tmp_path, folder, path, "merged")
    check_delta(folder, path, result, {"": 2.0})
    if form != "merged":
        export_adapter(folder, path, tmp_path / form, form)
        again = merged(tmp_path, tmp_path / form, path, "again")
        for name, tensor in result.items():
            np.testing.assert_allclose(again[name], tensor, rtol=0, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    "family, layout", [("glm4_moe", "per-expert"), ("deepseek_v3", "shared-outer"), ("gpt_oss", "per-expert")]
)
def test_what_was_exported_is_exported_again_in_every_form(tmp_path, family, layout):
    path, folder = write(tmp_path, family, layout)
    expected = merged(tmp_path, folder, path, "expected")
    for first in ("peft", "tinker"):
        export_adapter(folder, path, tmp_path / first, first)
        for second in ("peft", "tinker"):
            out = tmp_path / f"{first}-{second}"
            export_adapter(tmp_path / first, path, out, second)
            found = merged(tmp_path, out, path, f"{first}-{second}-merged")
            for name, tensor in expected.items():
                np.testing.assert_allclose(found[name], tensor, rtol=0, atol=2e-6, err_msg=name)


def nan(tensors):
    tensors[next(reversed(tensors))][...] = np.nan
    return tensors


@pytest.mark.parametrize("form", ["peft", "tinker", "merged"])
def test_a_refused_export_leaves_nothing(tmp_path, form):
    path, folder = write(tmp_path)
    change(folder, nan)
    export = export_merged if form == "merged" else export_adapter
    with pytest.raises(StartError, match="holds values that are not finite; save the adapter again"):
        export(folder, path, tmp_path / "out", None if form == "merged" else form)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["adapter", "model"]


@pytest.mark.parametrize(
    "tensors, fields, message",
    [
        (lambda t: t, {"init_lora_weights": "pissa"}, "init_lora_weights of .* is 'pissa'"),
        (lambda t: t, {"alora_invocation_tokens": [3]}, "alora_invocation_tokens of"),
        (lambda t: t, {"lora_bias": True}, "lora_bias of"),
        (lambda t: t, {"target_modules": ["q_proj"]}, "target_modules is .*by which peft leaves it out"),
        (only("lora_A"), {}, "lacks .*lora_B"),
        (lambda t: t | {"base_model.model.lm_head.lora_B.bias": np.zeros(3)}, {}, "has .*lora_B.bias"),
        (lambda t: t | {"base_model.model.lm_head.lora_magnitude_vector": np.zeros(3)}, {}, "magnitude"),
        (
            lambda t: t | {"lm_head.lora_A.weight": t["base_model.model.lm_head.lora_A.weight"]},
            {},
            "twice, .*lm_head.lora_A.weight and .*lm_head.lora_A.weight",
        ),
        (lambda t: {k: v.astype(np.int8) for k, v in t.items()}, {}, "has the type I8"),
        (lambda t: {"weight": np.zeros(3)}, {}, "has no factors"),
    ],
)
def test_what_is_no_plain_adapter_is_refused(tmp_path, tensors, fields, message):
    path, folder = write(tmp_path)
    change(folder, tensors, **fields)
    with pytest.raises(StartError, match=message):
        export_adapter(folder, path, tmp_path / "out", "peft")


def test_factors_of_64_bits_are_taken(tmp_path):
    path, folder = write(tmp_path)
    change(folder, lambda tensors: {name: tensor.astype(np.float64) for name, tensor in tensors.items()})
    check_delta(folder, path, merged(tmp_path, folder, path, "merged"), {"": 2.0})


@pytest.mark.parametrize(
    "width, message",
    [
        (96, r"q_proj.lora_A.weight has the shape \[6, 96\]; it must be \[6, 32\] .*32 channels"),
        (32, r"has .*, and the base model, LlamaForCausalLM .*32 channels, .*q_proj.*'zai-org/GLM-4\.5'"),
    ],
)
def test_an_adapter_of_another_base_model_is_refused_with_what_both_have(tmp_path, width, message):
    path, _ = write(tmp_path)
    other = families.write(tmp_path / "other", "glm4_moe", hidden_size=width)
    folder = write_folder(tmp_path / "foreign", ADAPTER, read_model_config(other), "zai-org/GLM-4.5")
    with pytest.raises(StartError, match=message):
        export_adapter(folder, path, tmp_path / "out", "peft")


@pytest.mark.parametrize("form", ["peft", "tinker", "merged"])
def test_a_header_of_impossible_length_is_told(tmp_path, form):
    path, folder = write(tmp_path)
    (folder / WEIGHTS).write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    arguments = ["--format", form, "--out", str(tmp_path / "out"), "--base-model", str(path)]
    (path / "tokenizer.json").write_text("{}")
    refused = CliRunner().invoke(app, ["export", str(folder), *arguments])
    assert "is not a PEFT folder, or is damaged" in str(refused.exception)
    assert not (tmp_path / "out.partial").exists()


def test_a_base_model_whose_encoding_is_not_read_must_be_named(tmp_path):
    _, folder = write(tmp_path)
    change(folder, base_model_name_or_path="unsloth/Qwen3-8B-unsloth-bnb-4bit")
    with pytest.raises(StartError, match=r"'unsloth/Qwen3-8B-unsloth-bnb-4bit', a copy .* with --base-model"):
        base_model_of(folder)


@pytest.mark.parametrize("layout", ["shared-outer", "per-expert"])
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "gpt_oss"])
def test_every_pattern_matches_a_module_and_gives_the_first_its_own_rank(tmp_path, family, layout):
    """PEFT follows patterns of parameters, too, but warns that it ignored those that match no module."""
    path, folder = write(tmp_path, family, layout)
    export_adapter(folder, path, tmp_path / "out", "peft")
    config, factors = (
        json.loads((tmp_path / "out" / CONFIG).read_bytes()),
        load_file(tmp_path / "out" / WEIGHTS),
    )
    names = [name.removeprefix(PREFIX).removesuffix(".lora_A.weight") for name in factors if "lora_A" in name]
    modules = [name for name in names if name.rpartition(".")[2] in config["target_modules"]]
    assert modules
    assert any("gate_up_proj" in pattern for pattern in config["rank_pattern"])
    for field, default in (("rank_pattern", config["r"]), ("alpha_pattern", config["lora_alpha"])):
        for pattern in config[field]:
            assert any(re.match(rf"(.*\.)?({pattern})$", name) for name in modules)
        for name in modules:
            first = next((v for k, v in config[field].items() if re.match(rf"(.*\.)?({k})$", name)), default)
            assert first == (6 if field == "rank_pattern" else 12.0)
