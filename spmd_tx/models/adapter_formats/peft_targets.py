"""The modules and parameters of transformers 5 that PEFT adapts, and which maps each of them holds. No JAX.

Several maps may lie in one matrix, W += [B1 0; 0 B2] [A1; A2] (block-diagonal B). The matrices of all experts
are one parameter, ``mlp.experts.gate_up_proj`` or ``down_proj`` (``target_parameters``), whose factors
A [experts · rank, in] and B [out, rank · experts] have the expert's number as the slowest and as the fastest
index.
"""

from collections.abc import Iterable

from spmd_tx.models.adapter_formats.files import AdapterModule
from spmd_tx.models.declared.maps import Map
from spmd_tx.models.declared.model import LM_HEAD, Model

EXPERTS = "mlp.experts"
GATE_UP, DOWN = f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"
WRAPPED = "base_layer"


def target_of(module: AdapterModule, model: Model) -> str:
    """Return the name in transformers of the matrix or parameter that holds a module."""
    adapted = model.adapted[module.map]
    if adapted.numbers is None:
        return LM_HEAD.module
    number = adapted.numbers[module.at[0]]
    if not adapted.map.experts:
        return adapted.map.source.module.format(layer=number)
    at = adapted.map.adapter_module.partition(f"{EXPERTS}.")[0].format(layer=number)
    return at + (DOWN if adapted.map.name == "down" else GATE_UP)


def module_of(target: str, *, has_both: bool = True) -> str:
    """Return the module in which PEFT has a target's factors.

    It wraps the parameters of one module in turn: with ``has_both``, those of experts are both adapted.
    """
    if not target.endswith((GATE_UP, DOWN)):
        return target
    at = target.rpartition(".")[0]
    return f"{at}.{WRAPPED}" if has_both and target.endswith(GATE_UP) else at


def rows_of(declared: Map) -> tuple[slice, int]:
    """Return where the outputs of a map are in its target, and how many the target has up to its last."""
    if declared.source.rows is not None:
        return slice(*declared.source.rows), declared.source.rows[1]
    if declared.experts and declared.name in ("gate", "up"):  # which transformers puts one behind the other
        first = declared.width_out if declared.name == "up" else 0
        return slice(first, first + declared.width_out), first + declared.width_out
    return slice(None), declared.width_out


def heights(adapted: Iterable[AdapterModule], model: Model) -> dict[str, int]:
    """Return how many outputs each target has up to the last adapted one."""
    found: dict[str, int] = {}
    for module in adapted:
        target, height = target_of(module, model), rows_of(model.adapted[module.map].map)[1]
        found[target] = max(height, found.get(target, 0))
    return found
