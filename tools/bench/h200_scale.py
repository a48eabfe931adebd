"""Says at which sizes the parts of h200.py measure."""

from dataclasses import dataclass
from typing import TypeVar

import jax.numpy as jnp

from spmd_tx.models.declared.model import Model
from tests.support.model_shapes import QWEN3_4B, QWEN3_8B, TINY
from tools.bench.dummy import Dummy
from tools.bench.roofline import Ceilings

Choice = TypeVar("Choice")


@dataclass(frozen=True)
class Scale:
    """Holds whether this is a real run, or one that only shows that everything works."""

    is_dry: bool
    ceilings: Ceilings
    attention: str  # what the self-test has chosen
    shard: tuple[int, int] = (0, 1)  # which of how many equal shares of a part's checks is this process's

    def pick(self, full: Choice, tiny: Choice) -> Choice:
        return tiny if self.is_dry else full

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.bfloat16)

    def dummy(self, model: Model, slots: int = 4) -> Dummy:
        return Dummy(self.pick(model, TINY), self.pick(32, 4), slots, self.dtype)


def model_name(model: Model) -> str:
    """Return the short name of a model in the tables."""
    return {QWEN3_8B: "8B", QWEN3_4B: "4B"}.get(model, "tiny")
