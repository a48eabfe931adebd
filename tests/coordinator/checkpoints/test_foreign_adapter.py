import json
from dataclasses import replace

import ml_dtypes
import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spmd_tx.coordinator.checkpoints.foreign_adapter import FILES, convert, most_bytes
from spmd_tx.errors import InvalidRequest
from spmd_tx.models.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from spmd_tx.protocol.commands import AdapterSpec
from tests.support.adapter_folders import random_tensors, write_folder
from tests.support.model_shapes import TINY

MIXTURE = replace(TINY, architecture="Qwen3MoeForCausalLM", d_ff=16, n_experts=4, experts_per_token=2)
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
        ({"bias": "all"}, "bias .* is 'all'; this server has 'none' only"),
        ({"use_dora": True}, "use_dora .* is True"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type .* is 'IA3'"),
        ({"lora_alpha": 0}, "lora_alpha .* must be positive"),
        ({"r": "many"}, "cannot be read"),
    ],
)
def test_a_configuration_that_means_something_else_is_refused(tmp_path, folder, values, message):
    change_config(folder, **values)
    with pytest.raises(InvalidRequest, match=message):
        convert(folder, tmp_path / "place", ANNOUNCED, TINY, [BASE])


@pytest.mark.parametrize("name", ["/home/me/models/qwen3-0.6b", "Qwen/Qwen3-0.6B:peft:32768", None])
def test_a_base_model_may_be_called_by_its_directory_or_not_at_all(tmp_path, folder, name):
    change_config(folder, base_model_name_or_path=name)
    convert(folder, tmp_path / "place", ANNOUNCED, TINY, [BASE])


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda t: {k: v for k, v in t.items() if k != K},
            r"lacks .*k_proj.lora_A.*all layers, or in none",
        ),
        (lambda t: t.update({K: t[K][:2]}), r"has the shape \[2, 64\]; it must be \[4, 64\]"),
        (lambda t: t.update({K: t[K].astype(np.float64)}), "has the type F64"),
        (lambda t: t[K].fill(np.nan), "not finite"),
        (lambda t: t.update({K.removeprefix("base_model.model."): t[K]}), "twice"),
        (
            lambda t: t.update({"base_model.model.model.embed_tokens.lora_A.weight": t[K]}),
            "has .*embed_tokens",
        ),
        (lambda t: {k: v for k, v in t.items() if "lm_head" not in k}, "train_unembed is true"),
    ],
    ids=["missing", "shape", "type", "nan", "twice", "target", "flag"],
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
    with pytest.raises(InvalidRequest, match=r"experts\.0\..*shared-outer"):
        convert(folder, tmp_path / "place", ANNOUNCED, MIXTURE, [BASE])


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
