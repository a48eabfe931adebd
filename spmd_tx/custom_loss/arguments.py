"""Binds the arguments of a custom loss's nodes as Python does, and checks them against their forms."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spmd_tx.custom_loss.operations import LossOperation, OperationParameter

MOST_SHOWN = 128  # characters of a name in a message


@dataclass(frozen=True)
class Ref:
    """Refers to the value of an earlier node."""

    name: str


@dataclass(frozen=True)
class DtypeName:
    """Names a type of elements, as torch does."""

    name: str


class BadArguments(Exception):
    """Says why arguments do not fit an operation."""


def bind(operation: LossOperation, positional: list[Any], named: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by name. Raises BadArguments if some are missing, unknown or given twice."""
    parameters = operation.parameters
    if operation.name == "einsum":
        positional = _gathered(positional, 1)
    elif operation.takes_sizes:
        place = next(place for place, each in enumerate(parameters) if each.form == "sizes")
        positional = _gathered(positional, place)
    if operation.name in ("max", "min") and "other" in named:
        named["dim"] = named.pop("other")
    named = {_renamed(key, operation): value for key, value in named.items()}
    all_names = {each.name for each in parameters}
    names = [each.name for each in parameters[: len(positional)]]
    if len(positional) > len(parameters) or not all_names.issuperset(named) or set(names) & set(named):
        raise BadArguments(f"its arguments do not fit; {operation.name} takes {_signature(operation)}")
    arguments = dict(zip(names, positional, strict=True)) | named
    missing = [each.name for each in parameters if each.is_required and each.name not in arguments]
    if missing:
        raise BadArguments(f"it lacks {', '.join(missing)}; {operation.name} takes {_signature(operation)}")
    return arguments


def _gathered(positional: list[Any], place: int) -> list[Any]:
    """Turn x.view(2, 3) into x.view((2, 3)); a list or tuple stays as it is."""
    rest = positional[place:]
    if not rest or isinstance(rest[0], list | tuple):
        return positional
    return [*positional[:place], tuple(rest)]


def _renamed(key: str, operation: LossOperation) -> str:
    """Resolve torch's other names: ``input`` or ``self`` for the first argument, and some synonyms."""
    names = {each.name for each in operation.parameters}
    if key in names:
        return key
    first = operation.parameters[0].name
    others = {"input": first, "self": first, "axis": "dim", "fill_value": "value", "ord": "p"}
    return others.get(key, key)


def has_form(value: Any, parameter: OperationParameter) -> bool:
    if value is None and not parameter.is_required:
        return True
    is_int = isinstance(value, int) and not isinstance(value, bool)
    is_number = isinstance(value, int | float)
    forms: dict[str, Callable[[], bool]] = {
        "tensor": lambda: isinstance(value, Ref),
        "value": lambda: isinstance(value, Ref | DtypeName) or is_number,
        "number": lambda: isinstance(value, Ref) or is_number,
        "int": lambda: isinstance(value, Ref) or is_int,
        "bool": lambda: isinstance(value, bool),
        "text": lambda: isinstance(value, str) and (not parameter.words or value in parameter.words),
        "dims": lambda: is_int or isinstance(value, Ref) or _all_sizes(value),
        "sizes": lambda: _all_sizes(value),
        "dtype": lambda: isinstance(value, DtypeName | Ref),
        "index": lambda: _is_index(value),
        "tensors": lambda: isinstance(value, list | tuple) and all(isinstance(each, Ref) for each in value),
        "nothing": lambda: value is None or value is False,
    }
    return forms[parameter.form]()


def _all_sizes(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(each, Ref) or (isinstance(each, int) and not isinstance(each, bool)) for each in value
    )


def _is_index(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_index(each) and not isinstance(each, tuple | list) for each in value)
    if isinstance(value, slice):
        return all(
            each is None or isinstance(each, Ref | int) for each in (value.start, value.stop, value.step)
        )
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return value is None or value is ... or isinstance(value, Ref) or is_int


def refs(value: Any) -> set[str]:
    if isinstance(value, Ref):
        return {value.name}
    if isinstance(value, slice):
        return refs((value.start, value.stop, value.step))
    if isinstance(value, list | tuple):
        return set().union(*map(refs, value))
    return set()


def hint(target: str) -> str:
    name = target.rpartition(".")[2]
    if name.endswith("_") and not name.endswith("__"):
        return "; nothing may be changed in place, use the form without the underscore"
    if name in ("setitem", "index_put", "scatter"):
        return "; nothing may be changed in place, use torch.where or masked_fill"
    if name in ("masked_select", "nonzero"):
        return "; its result has no fixed shape, multiply by the mask, or use torch.where"
    if name in ("rand", "randn", "rand_like", "randn_like", "dropout", "bernoulli", "multinomial"):
        return "; a loss draws no random numbers, send them as loss_fn_inputs"
    return "; use detach() instead of torch.no_grad()" if "grad" in name else ""


def printed(text: str, most: int = MOST_SHOWN) -> str:
    """Shorten a client's text for a message, and escape characters that are not printable."""
    cut = text if len(text) <= most else text[:most] + "..."
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in cut
    )


def quoted(text: str) -> str:
    """Return what ``printed`` does, in quotation marks."""
    return f"'{printed(text)}'"


def shown(target: str) -> str:
    return f"method {printed(target[1:])}" if target.startswith(".") else printed(target)


def described(value: Any) -> str:
    if isinstance(value, Ref):
        return f"node {printed(value.name)}"
    if isinstance(value, str):
        return f"'{printed(value, 60)}'"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return repr(value)[:60]


def _signature(operation: LossOperation) -> str:
    return ", ".join(each.name + ("" if each.is_required else "=...") for each in operation.parameters)
