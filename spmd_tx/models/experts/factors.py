"""The factors of adapters that experts have of their own, and what shared ones add to inputs and outputs.

Where all experts share the factors that touch the model width, these are applied before and after the experts
("shared-outer", declared/model.py). An expert's input is then [x | x A of gate | x A of up], and its output
[y | what B of down takes].

Dimension key: X expert, S slot, Q rank, D model width, F feed-forward width.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from spmd_tx.models.adapters.lora import Lora

# Of gate, up and down: [X, S, Q, D or F]. Shared ones are None: a of gate and up, b of down.
Factors = dict[str, Lora[Any]]


def is_shared(lora: dict[str, Lora[Array]]) -> bool:
    """Say whether experts share the outer factors: then those have no dimension X."""
    return lora["gate"].a.ndim < lora["gate"].b.ndim


def expert_factors(lora: dict[str, Lora[Array]]) -> Factors:
    """Leave out the shared factors."""
    inner: Factors = {name: lora[name].replace(a=None) for name in ("gate", "up")}
    return inner | {"down": lora["down"].replace(b=None)}


def shared_factors(lora: dict[str, Lora[Array]]) -> Factors:
    """Leave out the factors that each expert has of its own."""
    outer: Factors = {name: lora[name].replace(b=None) for name in ("gate", "up")}
    return outer | {"down": lora["down"].replace(a=None)}


def model_width(lora: Factors, x: Array) -> int:
    """Return D of an expert's input."""
    shared = lora["gate"].a is None
    return x.shape[-1] - (2 * lora["gate"].b.shape[-2] if shared else 0)


def output_width(lora: Factors, x: Array) -> int:
    """Return the width of an expert's output for an input."""
    shared = lora["down"].b is None
    return model_width(lora, x) + (lora["down"].a.shape[-2] if shared else 0)


def split_input(lora: Factors, x: Array) -> tuple[Array, Array, Array]:
    """Return x itself, and what the shared factors of gate and of up have made of it."""
    width, rank = model_width(lora, x), lora["gate"].b.shape[-2]
    own, gate, up = jnp.split(x, [width, width + rank], axis=-1)
    return own, gate, up
