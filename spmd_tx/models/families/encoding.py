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

    A model with vision may have it in its ``text_config``. MXFP4 is left to the families: it encodes what is
    stored otherwise without it.
    """
    keys = Keys(raw)
    quantization = keys.mapping("quantization_config") or Keys(keys.mapping("text_config")).mapping(
        "quantization_config"
    )
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
    spared = quantization.get("modules_to_not_convert") or quantization.get("ignore") or []
    if not isinstance(spared, list):
        raise Refusal(f"has {spared!r} as the modules of its quantization_config; it must be a list of names")
    return replace(
        model,
        encoding=encoding,
        plain=tuple(_pattern(module) for module in spared),
        ignored=(*model.ignored, SHAPES),
    )


def _pattern(module: object) -> str:
    """Return a regular expression of a module and those within it, or what follows "re:". Raises Refusal."""
    if not isinstance(module, str):
        raise Refusal(f"has {module!r} among the modules of its quantization_config; it must be a name")
    if module.startswith("re:"):
        pattern = f"(?:{module.removeprefix('re:')}).*"
        try:
            re.compile(pattern)
        except re.error as error:
            raise Refusal(
                f"has {module!r} among the modules of its quantization_config, which is not a regular "
                f"expression: {error}"
            ) from None
        return pattern
    return rf"(?:.*\.)?{re.escape(module)}(?:\..*)?"
