import pytest

from spmd_tx.config import ServerConfig
from spmd_tx.errors import StartError


@pytest.mark.parametrize(
    "name", ["tensor_parallel_size", "max_lora_adapters", "max_lora_rank", "num_processes"]
)
def test_a_size_of_zero_is_refused_by_the_name_of_its_option(name):
    with pytest.raises(StartError, match=f"--{name.replace('_', '-')} is 0; it must be at least 1"):
        ServerConfig(base_model="m", **{name: 0})
