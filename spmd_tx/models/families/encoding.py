"""Reads how a config.json says that a checkpoint's matrices are encoded."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from spmd_tx.models.declared.encoding import Mxfp4, encoding_of
from spmd_tx.models.declared.layers import Model
from spmd_tx.models.families.keys import Keys, Refusal

SHAPES = r".*\.weight_shape"  # of packed matrices, which the declaration has, too


def encoded(model: Model, raw: Mapping[str, Any]) -> Model:
    """Return the model with the encoding of its ``quantization_config``, if there is one. Raises Refusal.

    MXFP4 is left to the families: it encodes what is stored otherwise without it.
    """
    quantization = Keys(raw).mapping("quantization_config")
    if not quantization:
        return model
    try:
        encoding = encoding_of(quantization)
    except ValueError as problem:
        raise Refusal(f"has a quantization_config that is not served: {problem}") from None
    if isinstance(encoding, Mxfp4):
        if not any(isinstance(each.map.source.encoding, Mxfp4) for each in model.adapted.values()):
            raise Refusal("has a quantization_config that is not served: mxfp4 is read of gpt-oss only")
        return model
    spared = quantization.get("modules_to_not_convert") or quantization.get("ignore") or ()
    return replace(
        model,
        encoding=encoding,
        plain=tuple(_pattern(module) for module in spared),
        ignored=(*model.ignored, SHAPES),
    )


def _pattern(module: str) -> str:
    """Return a regular expression of a module and those within it, or what follows "re:"."""
    if module.startswith("re:"):
        return f"(?:{module.removeprefix('re:')}).*"
    return rf"(?:.*\.)?{re.escape(module)}(?:\..*)?"
