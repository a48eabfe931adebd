"""Makes checks of types when they are first needed, and once for functions of one name and signature.

A function that is defined within another is a new one at each call, and most functions of a module are never
called in the process that imports it.
"""

import functools
import inspect
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, get_args, get_origin

from beartype import beartype
from jaxtyping import AbstractArray, install_import_hook

SOURCE = Path(__file__).parents[2] / "spmd_tx"

_checks: dict[Hashable, Callable[..., Any]] = {}


def check_annotated_modules() -> None:
    """Check types in the modules that say shapes of arrays, before they are imported.

    Elsewhere the checks took more time than the code.
    """
    install_import_hook(annotated_modules(), f"{__name__}.{checked.__name__}")


def annotated_modules() -> list[str]:
    files = (file for file in SOURCE.rglob("*.py") if "from jaxtyping import" in file.read_text())
    return [".".join(file.relative_to(SOURCE.parent).with_suffix("").parts) for file in files]


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what checks arguments like ``beartype(function)``.

    For jaxtyping, whose functions have no more than a name and a signature: equal ones do the same.
    """

    @functools.wraps(function)
    def check(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return made()(*args, **kwargs)

    made = functools.cache(functools.partial(_made, function))
    return check


def _made(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)
    parameters = ((each.name, each.kind, _type(each.annotation)) for each in signature.parameters.values())
    key = (function.__module__, function.__qualname__, *parameters, _type(signature.return_annotation))
    try:
        known = _checks.get(key)
    except TypeError:  # what an annotation is made of may have no hash
        return beartype(function)
    if known is None:
        known = _checks[key] = beartype(function)
    return known


def _type(annotation: Any) -> Any:
    """Return what is equal for equal types; jaxtyping makes a new class whenever it is asked for one."""
    if isinstance(annotation, type) and issubclass(annotation, AbstractArray):
        return annotation.__name__, annotation.dtypes, _type(annotation.array_type), annotation.dim_str
    if isinstance(annotation, list):  # the parameters of a Callable
        return tuple(map(_type, annotation))
    origin = get_origin(annotation)
    return annotation if origin is None else (origin, *map(_type, get_args(annotation)))
