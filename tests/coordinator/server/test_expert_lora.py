"""The layout of adapters of experts is settled once for a data directory."""

import pytest

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.server.expert_lora import with_expert_lora
from spmd_tx.errors import StartError
from tests.support.model_shapes import QWEN3_8B, QWEN3_30B_A3B


def layout(folder, model=QWEN3_30B_A3B, **options) -> str:
    return with_expert_lora(ServerConfig(base_model="m", data_dir=folder, **options), model).expert_lora


def test_a_new_directory_shares_outer_factors_and_stays_as_it_began(tmp_path):
    assert layout(tmp_path / "data") == "shared-outer"
    assert layout(tmp_path / "data", expert_lora="shared-outer") == "shared-outer"
    assert layout(tmp_path / "other", expert_lora="per-expert") == "per-expert"
    assert layout(tmp_path / "other") == "per-expert"
    with pytest.raises(StartError, match=r"--expert-lora is shared-outer, but the adapters in .* per-expert"):
        layout(tmp_path / "other", expert_lora="shared-outer")


def test_a_directory_from_before_there_was_a_choice_has_factors_per_expert(tmp_path):
    (tmp_path / "snapshots").mkdir()
    assert layout(tmp_path) == "per-expert"


def test_a_model_without_experts_leaves_no_record(tmp_path):
    assert with_expert_lora(ServerConfig(base_model="m", data_dir=tmp_path), QWEN3_8B) == QWEN3_8B
    assert not list(tmp_path.iterdir())
