"""A data directory belongs to the base model that it began with."""

import pytest

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
