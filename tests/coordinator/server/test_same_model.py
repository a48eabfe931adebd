"""A data directory belongs to the base model that it began with."""

import json

import msgspec
import pytest
from msgspec.structs import replace

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.server.base_records import FILE, LAYOUT_FILE, MODEL_FILE, read_record
from spmd_tx.coordinator.server.same_model import SIZES, check_same_model
from spmd_tx.errors import StartError
from spmd_tx.models.families.registry import declare
from tests.support.known_models import CONFIGS
from tests.support.model_shapes import QWEN3_4B, QWEN3_8B


def test_a_model_of_another_shape_is_refused_and_the_first_one_goes_on(tmp_path):
    config = ServerConfig(base_model="m", data_dir=tmp_path / "data")
    check_same_model(config, QWEN3_4B, {})
    with pytest.raises(
        StartError, match=r"m is another model than m, .* d_model is 4096 and was 2560, .* --data-dir"
    ):
        check_same_model(config, QWEN3_8B, {})
    check_same_model(config, QWEN3_4B, {})


# What data directories hold of the sizes of models that servers have had, in the order of SIZES.
RECORDED = {
    "Qwen/Qwen3-4B": (36, 2560, 9728, 32, 8, 128, 0, 151936),
    "Qwen/Qwen3-30B-A3B": (48, 2048, 768, 32, 4, 128, 128, 151936),
    "Qwen/Qwen3.5-9B": (32, 4096, 12288, 16, 4, 256, 0, 248320),  # its first layers have linear attention
    "Qwen/Qwen3.5-35B-A3B": (40, 2048, 512, 16, 2, 256, 256, 248320),
    "zai-org/GLM-4.5-Air": (46, 4096, 1408, 96, 8, 128, 128, 151552),  # its first layer has no experts
    "zai-org/GLM-4.7-Flash": (47, 2048, 1536, 20, 1, 576, 64, 154880),  # of latent attention, its pages'
    "deepseek-ai/DeepSeek-V3.1": (61, 7168, 2048, 128, 1, 576, 256, 129280),
    "openai/gpt-oss-20b": (24, 2880, 2880, 64, 8, 64, 32, 201088),
}


@pytest.mark.parametrize("name", RECORDED)
def test_the_sizes_are_those_that_data_directories_hold(name, tmp_path):
    model = declare(CONFIGS[name])
    check_same_model(ServerConfig(base_model="m", data_dir=tmp_path), model, {})
    names = "n_layers d_model d_ff n_heads n_kv_heads head_dim n_experts vocab_size".split()
    record = json.loads((tmp_path / FILE).read_bytes())[0]["model"]
    assert record["sizes"] == dict(zip(names, RECORDED[name], strict=True))
    assert record["architecture"] == model.architecture


def test_a_damaged_record_is_named(tmp_path):
    for name in (MODEL_FILE, FILE):
        (tmp_path / name).write_text("{")
        with pytest.raises(StartError, match=f"{name} is damaged: .* restore it"):
            check_same_model(ServerConfig(base_model="m", data_dir=tmp_path), QWEN3_4B, {})


def test_adapters_and_whole_models_do_not_share_a_data_directory(tmp_path):
    adapters = ServerConfig(base_model="m", data_dir=tmp_path / "adapters")
    whole = ServerConfig(base_model="m", data_dir=tmp_path / "whole", full_parameters=True)
    for config in (adapters, whole, adapters, whole):
        check_same_model(config, QWEN3_4B, {})
    for config, other in ((adapters, whole), (whole, adapters)):
        with pytest.raises(
            StartError, match=r"trains (all weights|adapters), .* --full-parameters; .* --data-dir"
        ):
            check_same_model(replace(config, data_dir=other.data_dir), QWEN3_4B, {})


FILES = {"config.json": "0", "a.safetensors": "1 of 9 bytes", "b.safetensors": "2 of 9 bytes"}


def test_other_numbers_are_told_once(tmp_path, caplog):
    config = ServerConfig(base_model="m", data_dir=tmp_path)
    other = {**FILES, "a.safetensors": "3 of 9 bytes", "b.safetensors": "4 of 9 bytes"}
    for base_dtype, dtype, files in (
        ("auto", "auto", FILES),
        ("int8", "auto", FILES),
        ("int8", "float32", FILES),
        ("int8", "float32", other),
        ("int8", "float32", other),
    ):
        started = replace(config, base_dtype=base_dtype, dtype=dtype)
        check_same_model(started, QWEN3_4B, files).settle(0, [8])
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "--base-dtype was auto at the last start and is int8 now",
        "--dtype was auto at the last start and is float32 now",
        "--base-model m has other weights or another configuration than at the last start, in a.safetensors "
        "and 1 more",
    ]


def test_another_revision_is_told_where_it_has_other_weights(tmp_path, caplog):
    config = ServerConfig(base_model="m", data_dir=tmp_path)
    other = {**FILES, "a.safetensors": "3 of 9 bytes"}
    for revision, files in ((None, FILES), ("v1", FILES), ("v2", other), (None, FILES)):
        check_same_model(replace(config, revision=revision), QWEN3_4B, files).settle(0, [8])
    told = (
        "--base-model m has other weights or another configuration than at the last start, in a.safetensors"
    )
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        f"{told} (--revision was v1 and is v2 now)",
        f"{told} (--revision was v2 and is left out now)",
    ]
    changed = check_same_model(replace(config, revision="v2"), QWEN3_4B, other)
    with pytest.raises(StartError, match=r"--revision was left out and is v2 now\); but 3 training requests"):
        changed.settle(3, [8])


def test_steps_are_not_run_again_with_other_numbers(tmp_path):
    config = ServerConfig(base_model="m", data_dir=tmp_path)
    check_same_model(config, QWEN3_4B, FILES).settle(0, [])
    for _ in range(2):  # a start that was refused is not the last one
        changed = check_same_model(replace(config, dtype="float32"), QWEN3_4B, FILES)
        with pytest.raises(
            StartError,
            match=r"--dtype was auto .* float32 now; but 3 training .* or remove .model. from .*bases\.json",
        ):
            changed.settle(3, [8])
    check_same_model(config, QWEN3_4B, FILES).settle(3, [8])
    records = json.loads((tmp_path / FILE).read_bytes())
    del records[0]["model"]
    (tmp_path / FILE).write_text(json.dumps(records))
    check_same_model(replace(config, dtype="float32"), QWEN3_4B, FILES).settle(3, [8])


@pytest.mark.parametrize("trains_all", [False, True])
@pytest.mark.parametrize("ranks, trained_all", [([], None), ([8, 0], False), ([0], True)])
def test_a_directory_without_a_mark_is_of_the_kind_of_its_models(ranks, trained_all, trains_all, tmp_path):
    sizes = {name: getattr(QWEN3_4B, name) for name in SIZES}
    record = {"base_model": "m", "architecture": QWEN3_4B.architecture, "sizes": sizes}
    (tmp_path / MODEL_FILE).write_bytes(msgspec.json.encode(record))
    config = ServerConfig(base_model="m", data_dir=tmp_path, full_parameters=trains_all)
    found = check_same_model(config, QWEN3_4B, FILES)
    if trained_all not in (None, trains_all):
        with pytest.raises(StartError, match="--full-parameters; start it as before"):
            found.settle(0, ranks)
        return
    found.settle(0, ranks)
    check_same_model(config, QWEN3_4B, FILES)
    with pytest.raises(StartError, match="--full-parameters; start it as before"):
        check_same_model(replace(config, full_parameters=not trains_all), QWEN3_4B, FILES)


# What the version before bases.json has left for a mixture.
EARLIER = {
    MODEL_FILE: '{"base_model":"/models/q","architecture":"Qwen3ForCausalLM","sizes":{"n_layers":36,'
    '"d_model":2560,"d_ff":9728,"n_heads":32,"n_kv_heads":8,"head_dim":128,"n_experts":0,'
    '"vocab_size":151936},"trains_all_weights":false,"base_dtype":"auto","dtype":"auto",'
    '"files":{"config.json":"0","a.safetensors":"1 of 9 bytes","b.safetensors":"2 of 9 bytes"},'
    '"revision":null}',
    LAYOUT_FILE: "shared-outer\n",
}


def test_the_files_of_earlier_versions_are_the_first_base(tmp_path):
    for name, content in EARLIER.items():
        (tmp_path / name).write_text(content)
    config = ServerConfig(base_model="/models/q", served_model_name="mine,q", data_dir=tmp_path)
    with pytest.raises(StartError, match="d_model is 4096 and was 2560"):
        check_same_model(config, QWEN3_8B, FILES)
    found = check_same_model(config, QWEN3_4B, FILES)
    assert not found.changes
    found.settle(0, [8])
    for name in EARLIER:
        (tmp_path / name).unlink()
    record = read_record(config)
    assert (record.key, record.names, record.expert_lora) == ("mine", ["mine", "q"], "shared-outer")
    assert not check_same_model(config, QWEN3_4B, FILES).changes


def test_a_base_that_is_called_otherwise_keeps_its_key_and_the_names_that_it_had(tmp_path):
    for names in ("first,also", "second", "third,also"):
        config = ServerConfig(base_model="m", served_model_name=names, data_dir=tmp_path)
        check_same_model(config, QWEN3_4B, FILES).settle(0, [8])
    record = read_record(config)
    assert (record.key, record.names) == ("first", ["third", "also", "second", "first"])
