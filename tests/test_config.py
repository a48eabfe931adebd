import math

import msgspec
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


NUMBERS = [
    field.name
    for field in msgspec.structs.fields(ServerConfig)
    if isinstance(field.default, int | float) and not isinstance(field.default, bool)
]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [-1, 2**31, 10**30, math.inf, math.nan])
def test_every_number_has_bounds(name, value):
    with pytest.raises(
        StartError, match=f"--{name.replace('_', '-')} is {value}; it must be (from|at least) "
    ):
        ServerConfig(base_model="m", **{name: value})


@pytest.mark.parametrize("name", ["port", "worker_port", "jax_port"])
def test_a_port_is_one_that_can_be(name):
    assert getattr(ServerConfig(base_model="m", **{name: 65_535}), name) == 65_535
    with pytest.raises(StartError, match=f"--{name.replace('_', '-')} is 99999; it must be from 0 to 65535"):
        ServerConfig(base_model="m", **{name: 99_999})
