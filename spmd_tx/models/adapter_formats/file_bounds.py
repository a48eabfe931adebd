"""Bounds how large an adapter's file can be, in any form that is read. No JAX."""

import math
from dataclasses import replace
from typing import NamedTuple

from spmd_tx.models.adapter_formats.files import modules
from spmd_tx.models.adapter_formats.peft_targets import heights, target_of
from spmd_tx.models.declared.model import Model
from spmd_tx.protocol.commands import AdapterSpec

# What a file may have for parts of a model that are not served: far more than vision towers have.
OTHER_TENSORS, OTHER_NUMBERS_PER_RANK = 4096, 1 << 21


class Most(NamedTuple):
    """Says how large a file can be."""

    tensors: int
    numbers: int


def most_of(adapter: AdapterSpec, model: Model) -> Most:
    """Return the bounds on a file in the forms that take most."""
    adapted = list(modules(adapter, model))
    each = sum(1 for _ in modules(adapter, replace(model, expert_lora="per-expert")))
    height_of = heights(adapted, model)
    in_own_form = in_targets = 0
    for module in adapted:
        in_own_form += math.prod(module.a) + math.prod(module.b)
        declared = model.adapted[module.map].map
        ranks = module.a[-2] * (declared.experts if len(module.a) == 3 else 1)
        in_targets += ranks * (declared.width_in + height_of[target_of(module, model)])
    most = Most(2 * each, max(in_own_form, in_targets))
    if not model.ignored:
        return most
    return Most(most.tensors + OTHER_TENSORS, most.numbers + adapter.rank * OTHER_NUMBERS_PER_RANK)
