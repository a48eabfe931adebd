import asyncio

import pytest

from spmd_tx.coordinator.groups.same_numbers import SameNumbers
from spmd_tx.errors import StartError

NUMERICS = {"dtype": "float32", "base_dtype": "auto", "tensor parallelism": "1", "device": "cpu 0a"}


@pytest.fixture
def numbers():
    return SameNumbers("policy", all_bits=False)


def test_other_types_of_numbers_are_refused_by_name_and_value(numbers):
    numbers.join("policy", NUMERICS)
    numbers.join("policy", NUMERICS)
    with pytest.raises(
        StartError, match="dtype of rollouts is bfloat16, and of policy float32; groups of one"
    ):
        numbers.join("rollouts", NUMERICS | {"dtype": "bfloat16"})
    numbers.join("rollouts", NUMERICS)


def test_other_meshes_are_refused_only_where_bits_are_promised(numbers):
    other = NUMERICS | {"tensor parallelism": "2"}
    numbers.join("policy", NUMERICS)
    numbers.join("rollouts", other)
    strict = SameNumbers("policy", all_bits=True)
    strict.join("policy", NUMERICS)
    with pytest.raises(
        StartError, match=r"tensor parallelism of rollouts is 2, and of policy 1.*batch-invariant"
    ):
        strict.join("rollouts", other)


async def test_who_trains_is_right_whoever_was_first(numbers):
    numbers.join("rollouts", NUMERICS | {"dtype": "bfloat16"})
    watching = asyncio.create_task(numbers.watch("rollouts"))
    numbers.join("policy", NUMERICS)
    with pytest.raises(StartError, match="dtype of rollouts is bfloat16, and of policy float32"):
        await watching


def test_without_a_group_that_trains_the_first_one_is_right():
    numbers = SameNumbers(None, all_bits=False)
    numbers.join("a", NUMERICS)
    with pytest.raises(StartError, match="dtype of b is bfloat16, and of a float32"):
        numbers.join("b", NUMERICS | {"dtype": "bfloat16"})
