import json
import subprocess
import sys
from dataclasses import replace

import ml_dtypes
import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spmd_tx.coordinator.checkpoints.foreign_adapter import FILES, convert, most_bytes
from spmd_tx.demo import tiny_model
from spmd_tx.errors import InvalidRequest
from spmd_tx.exports.adapter_formats import export_adapter
from spmd_tx.models.adapter_formats.files import CONFIG_FILE, WEIGHTS_FILE, groups_of
from spmd_tx.models.adapter_formats.meaning import Meaning, Scales
from spmd_tx.models.config import read_model_config
from spmd_tx.protocol.commands import AdapterSpec
from tests.golden import families
from tests.support.adapter_folders import random_tensors, write_folder
from tests.support.model_shapes import TINY, resized

MIXTURE = resized(TINY, architecture="Qwen3MoeForCausalLM", d_ff=16, n_experts=4, experts_per_token=2)
PER_EXPERT = replace(MIXTURE, expert_lora="per-expert")
BASE = "Qwen/Qwen3-0.6B"
WHOLE = AdapterSpec(rank=4, alpha=10.0)
ANNOUNCED = AdapterSpec(rank=4)  # what lora_config says has no alpha
K = "base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight"


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "sent", WHOLE, TINY, BASE)


def change_config(folder, **values):
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps(config | values))


def rewrite(folder, change):
    tensors = load_file(folder / WEIGHTS_FILE)
    changed = change(tensors)
    save_file(tensors if changed is None else changed, folder / WEIGHTS_FILE)


@pytest.mark.parametrize("model", [TINY, MIXTURE, PER_EXPERT], ids=["dense", "shared", "per-expert"])
@pytest.mark.parametrize("adapter", [WHOLE, AdapterSpec(rank=2, train_attn=False, train_unembed=False)])
def test_what_a_server_has_exported_comes_in_byte_for_byte(tmp_path, model, adapter):
    folder = write_folder(tmp_path / "sent", adapter, model, BASE)
    announced = msgspec.structs.replace(adapter, alpha=32.0)
    assert convert(folder, tmp_path / "place", announced, model, [BASE]) == adapter
    limits = most_bytes(adapter, model)
    for name in FILES:
        assert (tmp_path / "place" / name).read_bytes() == (folder / name).read_bytes()
        assert (folder / name).stat().st_size <= limits[name]


def only(*parts):
    """Leave the factors whose names have one of the parts."""
    return lambda tensors: {k: v for k, v in tensors.items() if any(part in k for part in parts)}


PATTERN = r"(?:.*layers\.0\..*q_proj)|(?:model\.layers\.1\.self_attn\.(?:v_proj|o_proj))"


@pytest.mark.parametrize(
    "fields, kept",
    [
        ({"target_modules": ["q_proj", "v_proj"]}, ["q_proj", "v_proj"]),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1]}, ["layers.1.self_attn.q_proj"]),
        ({"layers_to_transform": 0, "layers_pattern": "layers"}, ["layers.0."]),
        ({"target_modules": PATTERN}, ["0.self_attn.q_proj", "1.self_attn.v_proj", "1.self_attn.o_proj"]),
        (
            {"target_modules": ["model.layers.1.mlp.up_proj", "0.self_attn.k_proj"]},
            ["1.mlp.up", "0.self_attn.k"],
        ),
        ({"exclude_modules": r".*\.0\.mlp\..*"}, ["layers.0.self_attn", "layers.1.", "lm_head"]),
        (
            {"exclude_modules": ["layers.1.mlp.gate_proj"]},
            ["self_attn", "layers.0.mlp", "up_proj", "down_proj", "lm_head"],
        ),
    ],
)
def test_modules_that_are_not_selected_have_no_factors(tmp_path, folder, fields, kept):
    change_config(folder, **fields)
    rewrite(folder, only(*kept))
    sent = load_file(folder / WEIGHTS_FILE)
    flags = {f"train_{group}": group in groups_of(sent) for group in ("attn", "mlp", "unembed")}
    convert(folder, tmp_path / "place", msgspec.structs.replace(ANNOUNCED, **flags), TINY, [BASE])
    stored = load_file(tmp_path / "place" / WEIGHTS_FILE)
    assert sent.keys() < stored.keys()
    for name, tensor in stored.items():
        np.testing.assert_array_equal(tensor, sent.get(name, np.zeros_like(tensor)), err_msg=name)


@pytest.mark.parametrize(
    "fields, field",
    [
        ({"target_modules": ["q_proj", "k_proj"]}, "target_modules"),
        ({"target_modules": r".*layers\.0\..*"}, "target_modules"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"exclude_modules": ["v_proj"]}, "exclude_modules"),
    ],
)
def test_factors_that_peft_would_leave_out_are_refused(tmp_path, folder, fields, field):
    change_config(folder, **fields)
    with pytest.raises(InvalidRequest, match=f"and {field} is .*, by which peft leaves it out"):
        convert(folder, tmp_path / "place", ANNOUNCED, TINY, [BASE])


def test_a_selected_module_that_lacks_factors_is_refused(tmp_path, folder):
    change_config(folder, target_modules=r".*\.(q|k|v|o|up|gate|down)_proj|lm_head")
    module = "layers.1.self_attn.k_proj"
    rewrite(folder, lambda tensors: {k: v for k, v in tensors.items() if module not in k})
    with pytest.raises(InvalidRequest, match=r"lacks .*layers\.1\.self_attn\.k_proj\.lora_A"):
        convert(folder, tmp_path / "place", ANNOUNCED, TINY, [BASE])


@pytest.mark.parametrize(
    "family, module",
    [
        ("mistral3", "model.vision_tower.transformer.layers.0.attention.q_proj"),
        ("mistral3", "multi_modal_projector.linear_1"),
        ("qwen3_5", "model.visual.blocks.0.attn.qkv"),
        ("qwen3_5", "mtp.layers.0.mlp.up_proj"),
    ],
)
def test_factors_of_what_is_not_served_are_left_out(tmp_path, family, module):
    text = families.CONFIGS["ministral3" if family == "mistral3" else family]
    path = families.write(tmp_path / "model", "ministral3" if family == "mistral3" else family)
    if family == "mistral3":
        config = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": family}
        (path / "config.json").write_text(json.dumps(config | {"text_config": text, "vision_config": {}}))
    model = read_model_config(path)
    folder = write_folder(tmp_path / "sent", WHOLE, model, BASE)
    change_config(folder, target_modules=r".*")
    was = load_file(folder / WEIGHTS_FILE)
    others = {f"base_model.model.{module}.lora_{which}.weight": np.full((99, 7), np.nan) for which in "AB"}
    rewrite(folder, lambda tensors: tensors | others)
    convert(folder, tmp_path / "place", ANNOUNCED, model, [BASE])
    now = load_file(tmp_path / "place" / WEIGHTS_FILE)
    assert now.keys() == was.keys()
    assert groups_of(others) == set()
    rewrite(folder, lambda _: random_tensors(WHOLE, TINY) | others)
    with pytest.raises(InvalidRequest, match=f"has .*{module}"):
        convert(folder, tmp_path / "other", ANNOUNCED, TINY, [BASE])


def test_other_spellings_and_types_come_in_as_ours(tmp_path, folder):
    def respell(tensors):
        for name in list(tensors):
            other = name.removeprefix("base_model.model.").replace("lm_head", "unembed_tokens")
            tensors[other] = tensors.pop(name).astype(ml_dtypes.bfloat16)

    rewrite(folder, respell)
    (folder / CONFIG_FILE).write_text('{"r": 4, "lora_alpha": 6, "use_rslora": true}')
    adapter = convert(folder, tmp_path / "place", ANNOUNCED, TINY, [BASE])
    assert adapter == AdapterSpec(rank=4, alpha=12.0)
    stored = load_file(tmp_path / "place" / WEIGHTS_FILE)
    expected = random_tensors(WHOLE, TINY)
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(stored[name], tensor.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_bfloat16_is_read_in_a_process_that_loads_no_model():
    code = "import spmd_tx.coordinator.checkpoints.foreign_adapter, numpy; numpy.dtype('bfloat16')"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_map_without_factors_gets_zeros(tmp_path, folder):
    rewrite(folder, lambda tensors: {k: v for k, v in tensors.items() if ".k_proj." not in k})
    convert(folder, tmp_path / "place", ANNOUNCED, TINY, [BASE])
    stored = load_file(tmp_path / "place" / WEIGHTS_FILE)
    assert not stored[K].any()
    assert stored[K.replace("k_proj", "q_proj")].any()


@pytest.mark.parametrize(
    "values, message",
    [
        (
            {"base_model_name_or_path": "Qwen/Qwen3-4B"},
            "'Qwen/Qwen3-4B', and the upload is for 'Qwen/Qwen3-0.6B'",
        ),
        ({"r": 8}, "r of adapter_config.json is 8, and lora_config.rank is 4"),
        ({"bias": "all"}, "bias .* is 'all', with which, unlike 'none', .*plain LoRA; merge"),
        ({"use_dora": True}, "use_dora .* is True, .*plain LoRA; merge such an adapter"),
        ({"alpha_pattern": {"q_proj": -1}}, "alpha_pattern of q_proj is -1"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern of q_proj is 0"),
        ({"rank_pattern": {"(?=a)q_proj": 2}}, r"the pattern '\(\?=a\)q_proj' is not read"),
        ({"rank_pattern": {"q_proj": 2}}, r"q_proj.*has the shape \[4, 64\]; it must be \[2, 64\]"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type .* is 'IA3'"),
        ({"lora_alpha": 0}, "lora_alpha is 0.* must be positive"),
        ({"alpha_pattern": {"q_proj": 1e300}}, "at most 1e\\+09"),
        ({"r": "many"}, "cannot be read"),
    ],
)
def test_a_configuration_that_means_something_else_is_refused(tmp_path, folder, values, message):
    change_config(folder, **values)
    with pytest.raises(InvalidRequest, match=message):
        convert(folder, tmp_path / "place", ANNOUNCED, TINY, [BASE])


@pytest.mark.parametrize(
    "name", ["/home/me/models/qwen3-0.6b", "unsloth/Qwen3-0.6B-bnb-4bit", "Qwen/Qwen3-0.6B:peft:32768", None]
)
def test_a_base_model_may_be_called_by_its_directory_or_not_at_all(tmp_path, folder, name):
    change_config(folder, base_model_name_or_path=name)
    convert(folder, tmp_path / "place", ANNOUNCED, TINY, [BASE])


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda t: {k: v for k, v in t.items() if k != K},
            r"lacks .*k_proj.lora_A.*all layers that .* selects, or in none",
        ),
        (lambda t: t.update({K: t[K][:2]}), r"has the shape \[2, 64\]; it must be \[4, 64\]"),
        (lambda t: t.update({K: t[K].astype(np.int8)}), "has the type I8"),
        (lambda t: t[K].fill(np.nan), "not finite"),
        (lambda t: t.update({K.removeprefix("base_model.model."): t[K]}), "twice"),
        (
            lambda t: t.update({"base_model.model.model.embed_tokens.lora_A.weight": t[K]}),
            "has .*embed_tokens",
        ),
        (lambda t: {k: v for k, v in t.items() if "lm_head" not in k}, "train_unembed is true"),
        (
            lambda t: t.update({"base_model.model.lm_head.base_layer.weight": t[K]}),
            "lm_head.base_layer.weight.*save_embedding_layers=False",
        ),
    ],
    ids=["missing", "shape", "type", "nan", "twice", "target", "flag", "head"],
)
def test_factors_that_the_adapter_cannot_have_are_refused(tmp_path, folder, change, message):
    rewrite(folder, change)
    with pytest.raises(InvalidRequest, match=message):
        convert(folder, tmp_path / "place", ANNOUNCED, TINY, [BASE])


def test_factors_beside_those_announced_are_refused_with_the_flags(tmp_path, folder):
    announced = msgspec.structs.replace(ANNOUNCED, train_mlp=False)
    with pytest.raises(InvalidRequest, match=r"mlp.*and \d+ more; .*train_mlp False.*k_proj"):
        convert(folder, tmp_path / "place", announced, TINY, [BASE])


def test_factors_of_experts_in_the_other_layout_are_refused(tmp_path):
    folder = write_folder(tmp_path / "sent", WHOLE, PER_EXPERT, BASE)
    with pytest.raises(InvalidRequest, match=r"experts of .* factors of their own, .*per-expert"):
        convert(folder, tmp_path / "place", ANNOUNCED, MIXTURE, [BASE])


def test_experts_that_share_come_in_where_they_need_not_if_the_rank_allows_it(tmp_path):
    folder = write_folder(tmp_path / "sent", WHOLE, MIXTURE, BASE)
    message = "has rank 4, and in an adapter of rank 4 it has at most 2; set lora_config.rank 8"
    with pytest.raises(InvalidRequest, match=message):
        convert(folder, tmp_path / "place", ANNOUNCED, PER_EXPERT, [BASE])
    announced = msgspec.structs.replace(ANNOUNCED, rank=8)
    adapter = convert(folder, tmp_path / "other", announced, PER_EXPERT, [BASE])
    assert adapter.scale == WHOLE.scale
    was, now = (load_file(each / WEIGHTS_FILE) for each in (folder, tmp_path / "other"))
    for name, ours in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        at = f"base_model.model.model.layers.1.mlp.experts.{name}.lora_"
        a, b = was[f"{at}A.weight"], was[f"{at}B.weight"]
        for expert in range(4):
            at = f"base_model.model.model.layers.1.mlp.experts.{expert}.{ours}.lora_"
            its_a, its_b = now[f"{at}A.weight"], now[f"{at}B.weight"]
            wanted = WHOLE.scale * b[min(expert, len(b) - 1)] @ a[min(expert, len(a) - 1)]
            found = adapter.alpha / len(its_a) * its_b @ its_a
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def test_ranks_and_scales_may_differ_between_modules(tmp_path, folder):
    """Lower ranks are padded, and B takes up what the scale differs."""
    change_config(
        folder,
        rank_pattern={r"layers.\d+.self_attn.q_proj": 2, "lm_head": 3},
        alpha_pattern={"model.layers.1.self_attn.q_proj": 5.0},
    )
    rewrite(folder, lambda tensors: cut(tensors, "q_proj", 2) or cut(tensors, "lm_head", 3))
    adapter = convert(folder, tmp_path / "place", ANNOUNCED, TINY, [BASE])
    assert adapter == WHOLE
    was, now = (load_file(each / WEIGHTS_FILE) for each in (folder, tmp_path / "place"))
    scales = {"layers.1.self_attn.q_proj": 5 / 2, "q_proj": 10 / 2, "lm_head": 10 / 3, "": 10 / 4}
    for name, a in was.items():
        if ".lora_A." in name:
            scale = next(scale for part, scale in scales.items() if part in name)
            b, its_b = (each[name.replace("lora_A", "lora_B")] for each in (was, now))
            np.testing.assert_allclose(10 / 4 * its_b @ now[name], scale * b @ a, rtol=0, atol=1e-6)
    assert now[K.replace("k_proj", "q_proj")].shape == (4, 64)


def cut(tensors, module, rank):
    for name in [name for name in tensors if module in name]:
        tensors[name] = tensors[name][:rank].copy() if "lora_A" in name else tensors[name][:, :rank].copy()


MIXTURES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "gpt_oss", "qwen3_5_moe", "qwen3_moe")
LAYOUTS = [(family, "shared-outer") for family in sorted({*families.CONFIGS, *MIXTURES, "qwen3"})]
LAYOUTS += [(family, "per-expert") for family in MIXTURES]


@pytest.mark.parametrize("form", ["peft", "tinker"])
@pytest.mark.parametrize("family, layout", LAYOUTS, ids=str)
def test_what_was_exported_for_others_comes_back_as_it_was(tmp_path, form, family, layout):
    path = tmp_path / "model"
    if family in families.CONFIGS:
        families.write(path, family)
    else:
        tiny_model.write(path, tiny_model.Spec(family=family, d_model=48))
    model = read_model_config(path, layout)
    folder = write_folder(tmp_path / "adapter", WHOLE, model, BASE)
    export_adapter(folder, path, tmp_path / "sent", form, BASE)
    adapter = convert(tmp_path / "sent", tmp_path / "place", ANNOUNCED, model, [BASE])
    assert adapter == WHOLE
    limits = most_bytes(WHOLE, model)
    assert all((tmp_path / "sent" / name).stat().st_size <= limits[name] for name in FILES)
    was, now = (load_file(each / WEIGHTS_FILE) for each in (folder, tmp_path / "place"))
    assert was.keys() == now.keys()
    for name, tensor in was.items():
        np.testing.assert_allclose(now[name], tensor, rtol=1e-6, atol=0, err_msg=name)


def test_one_pair_for_several_maps_is_split(tmp_path):
    """PEFT trains a parameter of all experts with one A for gate and up, and B without blocks."""
    path = families.write(tmp_path / "model", "glm4_moe")
    model, random = read_model_config(path, "per-expert"), np.random.default_rng(0)
    rank = 2 * model.expert_rank_divisor
    adapter = AdapterSpec(rank=rank, alpha=4.0, train_attn=False, train_unembed=False)
    folder = write_folder(tmp_path / "adapter", adapter, model, BASE)
    export_adapter(folder, path, tmp_path / "sent", "peft", BASE)
    config = json.loads((tmp_path / "sent" / CONFIG_FILE).read_text())
    config["rank_pattern"][r"mlp\.experts\.gate_up_proj"] = 2
    config["alpha_pattern"][r"mlp\.experts\.gate_up_proj"] = 4.0
    change_config(tmp_path / "sent", **config)
    filled = {}

    def fill(tensors):
        for name in [name for name in tensors if "experts.base_layer" in name]:
            ranks, width = 2 * model.n_experts, tensors[name].shape[-1 if "lora_A" in name else 0]
            shape = (ranks, width) if "lora_A" in name else (width, ranks)
            tensors[name] = random.standard_normal(shape).astype(np.float32)
            filled[name.partition("layers.")[2].partition(".")[0]] = True

    rewrite(tmp_path / "sent", fill)
    convert(tmp_path / "sent", tmp_path / "place", adapter, model, [BASE])
    sent, now = (load_file(tmp_path / each / WEIGHTS_FILE) for each in ("sent", "place"))
    assert filled
    for layer in filled:
        at = f"base_model.model.model.layers.{layer}.mlp.experts"
        a = sent[f"{at}.base_layer.lora_A.weight"].reshape(model.n_experts, 2, -1)
        b = sent[f"{at}.base_layer.lora_B.weight"].reshape(-1, 2, model.n_experts)
        for expert in range(model.n_experts):
            pairs = [
                [now[f"{at}.{expert}.{name}_proj.lora_{factor}.weight"] for factor in "AB"]
                for name in ("gate", "up")
            ]
            found = np.concatenate([adapter.alpha / len(its_a) * its_b @ its_a for its_a, its_b in pairs])
            np.testing.assert_allclose(found, 2 * b[:, :, expert] @ a[expert], rtol=0, atol=1e-5)


@pytest.mark.parametrize("cut", [0, 7, 100, -1])
def test_a_file_that_was_cut_is_refused(tmp_path, folder, cut):
    content = (folder / WEIGHTS_FILE).read_bytes()
    (folder / WEIGHTS_FILE).write_bytes(content[:cut])
    with pytest.raises(InvalidRequest, match="is not a safetensors file, or is damaged"):
        convert(folder, tmp_path / "place", ANNOUNCED, TINY, [BASE])


def test_a_header_that_would_take_much_memory_is_not_read(tmp_path, folder):
    names = {f"t{number}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for number in range(30_000)}
    header = json.dumps(names).encode()
    (folder / WEIGHTS_FILE).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(InvalidRequest, match=rf"its header has {len(header)} bytes"):
        convert(folder, tmp_path / "place", ANNOUNCED, TINY, [BASE])


def test_the_first_pattern_that_matches_an_end_of_a_name_counts():
    meaning = Meaning(
        r=8,
        lora_alpha=8.0,
        rank_pattern={r"layers\.\d+\.self_attn.q_proj": 2, "q_proj": 3, "layers.1.self_attn.k_proj": 4},
        alpha_pattern={"^model.layers.1.self_attn.q_proj$": 6.0},
    )
    meaning.check()
    scales, at = Scales(meaning), "model.layers.{}.self_attn.{}_proj"
    assert [scales.rank(at.format(0, each)) for each in "qkv"] == [2, 8, 8]
    assert [scales.rank(at.format(1, each)) for each in "qkv"] == [2, 4, 8]
    assert [scales.scale(at.format(layer, "q")) for layer in (0, 1)] == [4.0, 3.0]
    assert scales.rank("model.layers.0.mlp.xq_proj") == 8
