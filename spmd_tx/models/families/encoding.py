"""Reads how a config.json says that a checkpoint's matrices are encoded."""

import re
from dataclasses import replace

from spmd_tx.models.declared.encoding import Encoding, Fp8Blocks, Int4Groups, Mxfp4, problem
from spmd_tx.models.declared.model import Model
from spmd_tx.models.families.keys import ConfigKeys, Refusal

KEY = "quantization_config"
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True}
OF_WORD = 8  # 4-bit integers that are packed together
SHAPES = r".*\.weight_shape"  # of packed matrices, which the declaration has, too


def encoded(model: Model, keys: ConfigKeys) -> Model:
    """Return the model with the encoding of its ``quantization_config``, if there is one. Raises Refusal.

    A model with vision may have it in its ``text_config``. MXFP4 is left to the families: it encodes what is
    stored otherwise without it.
    """
    quantization = keys.within(KEY)
    if not quantization.raw:
        quantization = keys.within("text_config").within(KEY)
    if not quantization.raw:
        return model
    encoding = encoding_of(quantization)
    if isinstance(encoding, Mxfp4):
        if not any(isinstance(each.source.encoding, Mxfp4) for each in model.maps):
            raise quantization.wrong("quant_method", ", which is read of gpt-oss only")
    else:
        spared = "modules_to_not_convert" if quantization.has("modules_to_not_convert") else "ignore"
        model = replace(
            model,
            encoding=encoding,
            plain=tuple(_pattern(module) for module in quantization.names(spared)),
            ignored=(*model.ignored, SHAPES),
        )
    _check_groups(model)
    return model


def encoding_of(quantization: ConfigKeys) -> Encoding:
    """Return the encoding that a ``quantization_config`` declares. Raises Refusal."""
    method = quantization.get("quant_method")
    if method == "fp8":
        return _of_blocks(quantization)
    if method == "mxfp4":
        return Mxfp4()
    if method == "compressed-tensors":
        return _of_groups(quantization)
    supported = "fp8, mxfp4 and compressed-tensors"
    raise quantization.wrong("quant_method", f", which is not supported; supported are {supported}")


def _of_blocks(quantization: ConfigKeys) -> Fp8Blocks:
    quantization.only(fmt="e4m3")
    size = quantization.get("weight_block_size")
    if not isinstance(size, list) or len(size) != 2:
        supported = ", which must be the rows and columns of a block; other fp8 is not read"
        raise quantization.wrong("weight_block_size", supported)
    sides = ConfigKeys(
        dict(zip(("rows", "columns"), size, strict=True)), f" in weight_block_size{quantization.of}"
    )
    return Fp8Blocks(sides.count("rows"), sides.count("columns"))


def _of_groups(quantization: ConfigKeys) -> Int4Groups:
    """Return the one form of compressed-tensors that is read: symmetric int4 with a scale per group."""
    if quantization.need("format") != "pack-quantized":
        raise quantization.wrong("format", ", which is not read; pack-quantized is")
    groups = quantization.within("config_groups")
    if len(groups.raw) != 1:
        raise quantization.wrong("config_groups", ", which must be one group")
    weights = groups.within(next(iter(groups.raw))).within("weights", " of its compressed-tensors")
    for key, value in INT4.items():
        if weights.get(key) != value:
            raise weights.wrong(key, f", which is not read; {value!r} is")
    if weights.get("actorder"):
        raise weights.wrong("actorder", ", an order of columns that is not read; null is")
    size = weights.count("group_size")
    if size % OF_WORD:
        raise weights.wrong("group_size", f", which must be a multiple of {OF_WORD}")
    return Int4Groups(size)


def _check_groups(model: Model) -> None:
    """Raise Refusal where a matrix cannot be encoded so."""
    for each in model.maps:
        encoding, shape = each.source.encoding, (each.width_out, each.width_in)
        if encoding is not None and (reason := problem(encoding, shape)):
            raise Refusal(f"has a quantization_config that does not fit {each.source.module}: {reason}")


def _pattern(module: str) -> str:
    """Return a regular expression of a module and those within it, or what follows "re:". Raises Refusal."""
    if module.startswith("re:"):
        pattern = f"(?:{module.removeprefix('re:')}).*"
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise Refusal(
                f"has {module!r} among the modules of its quantization_config, which is not a regular "
                f"expression: {error}"
            ) from None
        return pattern
    return rf"(?:.*\.)?{re.escape(module)}(?:\..*)?"
