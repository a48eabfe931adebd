import pytest

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.server.preflight import check_mesh
from spmd_tx.demo import tiny_model
from spmd_tx.errors import StartError
from spmd_tx.models.config import read_model_config


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return read_model_config(
        tiny_model.write(tmp_path_factory.mktemp("mixture"), tiny_model.PRESETS["tiny-moe"])
    )


@pytest.mark.parametrize(
    "options",
    [
        {"expert_parallel_size": 8},
        {"expert_parallel_size": 4, "tensor_parallel_size": 2},
        {"fully_sharded_data_parallel_size": 3},
        {"fully_sharded_data_parallel_size": 4, "shard_base_weights": "yes"},
    ],
)
def test_a_mesh_over_which_the_experts_split_is_taken(mixture, options):
    check_mesh(ServerConfig(base_model="tiny-moe", **options), mixture)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"expert_parallel_size": 3}, "--expert-parallel-size is 3, but 8 experts cannot be split 3 ways"),
        (
            {"fully_sharded_data_parallel_size": 3, "shard_base_weights": "yes"},
            "--shard-base-weights is yes .* width 64 cannot be split 3 ways",
        ),
    ],
)
def test_one_over_which_they_do_not_is_refused(mixture, options, message):
    with pytest.raises(StartError, match=message):
        check_mesh(ServerConfig(base_model="tiny-moe", **options), mixture)
