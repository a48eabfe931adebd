"""Reads a model from its Hugging Face ``config.json``. No JAX: the coordinator reads it too."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from spmd_tx.errors import StartError
from spmd_tx.models.declared.encoding import BASE_DTYPES
from spmd_tx.models.declared.model import EXPERT_LORA, ExpertLora, Model
from spmd_tx.models.families.keys import Refusal
from spmd_tx.models.families.registry import declare
from spmd_tx.protocol.setup import Setup

AS_STORED = "auto"  # the base_dtype of weights that stay as a checkpoint has them
MTP = "mtp"  # the speculation of models that make drafts themselves
PACKED, UNPACKED = "packed", "unpacked"  # ways of keeping the weights of experts


def layout_named(name: str) -> ExpertLora:
    """Return a layout of adapters of experts by its name."""
    return next(layout for layout in EXPERT_LORA if layout == name)


def read_model_config(
    model_dir: Path,
    expert_lora: str = EXPERT_LORA[0],
    expert_weights: str = UNPACKED,
    base_dtype: str = AS_STORED,
    speculation: str = "off",
) -> Model:
    """Read ``config.json``. ``expert_lora`` names the layout of adapters of experts.

    With ``expert_weights`` "packed" devices keep experts as the checkpoint encodes them; with one of
    BASE_DTYPES they keep all adapted maps of layers in it. With ``speculation`` "mtp" the model has the layer
    that makes drafts. Raises StartError when the file is missing, or the model is not supported, or cannot be
    kept so, or has no such layer.
    """
    raw = _read_json(model_dir / "config.json")
    try:
        model = declare(raw, drafts=speculation == MTP)
    except Refusal as problem:
        raise StartError(f"{model_dir}/config.json {problem}") from None
    if speculation == MTP and model.mtp is None:
        raise StartError(
            f"--speculation is mtp, but {model_dir}/config.json names no layer that predicts further tokens "
            "(num_nextn_predict_layers or mtp_num_hidden_layers); set it to auto or off"
        )
    if expert_weights == PACKED:
        model = _packing(model, model_dir)
    if base_dtype != AS_STORED:
        model = _in_base_dtype(model, base_dtype, model_dir)
    return replace(model, expert_lora=layout_named(expert_lora))


def model_of(setup: Setup) -> Model:
    """Read the model of a worker's setup, as read_model_config does."""
    kept = setup.expert_lora, setup.expert_weights, setup.base_dtype, setup.speculation
    return read_model_config(Path(setup.model_dir), *kept)


def _packing(model: Model, model_dir: Path) -> Model:
    """Return the model with packed experts. Raises StartError where it has none that can be."""
    model = replace(model, packs_experts=True)
    if not model.packed:
        raise StartError(
            f"--expert-weights is packed, but {model_dir} has no experts in MXFP4, FP8 or INT4; "
            "leave the option out"
        )
    for array in model.packed:
        if array.width_in % array.source.encoding.group:
            raise StartError(
                f"--expert-weights is packed, but {array.width_in} inputs of experts are not a multiple of "
                f"{array.source.encoding.group}, which share a scale; set it to unpacked"
            )
    return model


def _in_base_dtype(model: Model, base_dtype: str, model_dir: Path) -> Model:
    """Return the model whose adapted maps devices keep in fewer bits. Raises StartError where they cannot."""
    encoding = BASE_DTYPES[base_dtype]
    model = replace(model, base_encoding=encoding)
    for array in model.packed:
        if array.width_in % array.kept.group:
            raise StartError(
                f"--base-dtype is {base_dtype}, but the {array.width_in} inputs of {array.name} are not a "
                f"multiple of {array.kept.group}, which share a scale; set it to another one of "
                f"{', '.join(BASE_DTYPES)}, or leave it out"
            )
    return model


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise StartError(f"{path} does not exist; a model directory needs it") from None
    except OSError as error:
        raise StartError(
            f"cannot read {path}: {error.strerror}; it must be a file that the server may read"
        ) from None
    except (ValueError, RecursionError) as error:
        raise StartError(
            f"{path} is not valid JSON: {error}; restore it from where the model came from"
        ) from None
    if not isinstance(raw, dict):
        raise StartError(f"{path} holds a {type(raw).__name__}; it must be an object with the model's keys")
    return raw
