"""A data directory belongs to the base model that it began with."""

import pytest
from msgspec.structs import replace

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.server.same_model import RECORD, check_same_model
from spmd_tx.errors import StartError
from tests.support.model_shapes import QWEN3_4B, QWEN3_8B


def test_a_model_of_another_shape_is_refused_and_the_first_one_goes_on(tmp_path):
    config = ServerConfig(base_model="m", data_dir=tmp_path / "data")
    check_same_model(config, QWEN3_4B)
    with pytest.raises(
        StartError, match=r"m is another model than m, .* d_model is 4096 and was 2560, .* --data-dir"
    ):
        check_same_model(config, QWEN3_8B)
    check_same_model(config, QWEN3_4B)


def test_a_damaged_record_is_named(tmp_path):
    (tmp_path / RECORD).write_text("{")
    with pytest.raises(StartError, match=r"base_model\.json is damaged: .* delete it"):
        check_same_model(ServerConfig(base_model="m", data_dir=tmp_path), QWEN3_4B)


def test_adapters_and_whole_models_do_not_share_a_data_directory(tmp_path):
    adapters = ServerConfig(base_model="m", data_dir=tmp_path / "adapters")
    whole = ServerConfig(base_model="m", data_dir=tmp_path / "whole", full_parameters=True)
    for config in (adapters, whole, adapters, whole):
        check_same_model(config, QWEN3_4B)
    for config, other in ((adapters, whole), (whole, adapters)):
        with pytest.raises(
            StartError, match=r"trains (all weights|adapters), .* --full-parameters; .* --data-dir"
        ):
            check_same_model(replace(config, data_dir=other.data_dir), QWEN3_4B)


def test_other_types_are_told_once(tmp_path, caplog):
    config = ServerConfig(base_model="m", data_dir=tmp_path)
    for base_dtype in ("auto", "int8", "int8"):
        check_same_model(replace(config, base_dtype=base_dtype), QWEN3_4B)
    for dtype in ("float32", "float32"):
        check_same_model(replace(config, base_dtype="int8", dtype=dtype), QWEN3_4B)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "--base-dtype was auto at the last start and is int8 now",
        "--dtype was auto at the last start and is float32 now",
    ]
