"""What the steps of a decode draw, and the experts that their tokens went through.

Dimension key as in sample.py; C tokens of a prompt's chunk that one step reads beside the rows.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from spmd_tx.models.declared.model import Model
from spmd_tx.sharding.tree_node import TreeNode


class Drawn(TreeNode):
    """Holds what the steps of a decode drew, [K, B, ...], or of one step [B, ...]."""

    tokens: Any  # int32; -1 where the row is dead, REJECTED where it read a wrong draft
    logprobs: Any  # float32; nats
    experts: Any  # [K, B, L, k]: experts that each row's input used; None without experts
    redrawn: Any = None  # bool [K, B]: within a grammar, in place of another token; None: no row has a mask
    top_tokens: Any = None  # int32 [K, B, top]; None unless wanted
    top_logprobs: Any = None  # float32 [K, B, top]
    drafts: Any = None  # int32 [K, B]: what the model expects behind the token; None: it makes no drafts
    chunk_experts: Any = None  # [K, C, L, k]: those of a prompt's chunk; None: there is none

    @classmethod
    def none(
        cls,
        model: Model,
        shape: tuple[int, int],
        top: int,
        *,
        has_masks: bool,
        has_drafts: bool = False,
        chunk: int = 0,
    ) -> "Drawn":
        """Return the result before the first step; ``shape`` are steps and rows, ``chunk`` is C."""
        steps, rows = shape
        return cls(
            tokens=jnp.full(shape, -1, jnp.int32),
            logprobs=jnp.zeros(shape, jnp.float32),
            experts=_no_experts(model, steps, rows),
            redrawn=jnp.zeros(shape, jnp.bool_) if has_masks else None,
            top_tokens=jnp.zeros((*shape, top), jnp.int32) if top else None,
            top_logprobs=jnp.zeros((*shape, top), jnp.float32) if top else None,
            drafts=jnp.zeros(shape, jnp.int32) if has_drafts else None,
            chunk_experts=_no_experts(model, steps, chunk),
        )


def _no_experts(model: Model, steps: int, tokens: int) -> Array | None:
    if not (model.n_experts and tokens):
        return None
    return compact(model, jnp.zeros((steps, tokens, model.n_layers, model.experts_per_token), jnp.int32))


def compact(model: Model, experts: Array) -> Array:
    """Cast numbers of experts to the smallest type that holds them."""
    return experts.astype(jnp.uint8 if model.n_experts <= 256 else jnp.int16)
