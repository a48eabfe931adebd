import pytest

from spmd_tx.config import ServerConfig
from spmd_tx.errors import StartError


def test_a_parallel_size_is_a_number_or_auto():
    assert ServerConfig(base_model="m", tensor_parallel_size="auto").mesh is None
    with pytest.raises(StartError, match="--tensor-parallel-size is 'all'; it must be a number, or auto"):
        ServerConfig(base_model="m", tensor_parallel_size="all")


@pytest.mark.parametrize(
    "name", ["tensor_parallel_size", "max_lora_adapters", "max_lora_rank", "num_processes"]
)
def test_a_size_of_zero_is_refused_by_the_name_of_its_option(name):
    with pytest.raises(StartError, match=f"--{name.replace('_', '-')} is 0; it must be at least 1"):
        ServerConfig(base_model="m", **{name: 0})
