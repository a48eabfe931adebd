"""The files of an adapter: how tensors are called and shaped, and the configuration. No JAX.

Experts that share their outer factors are written as hosted Tinker writes them: ``mlp.experts.w1`` (gate),
``w3`` (up) and ``w2`` (down) have a lora_A [experts or 1, rank, in] and a lora_B [experts or 1, out, rank],
where 1 is the factor of all experts.

Experts with factors of their own are separate linear maps, as in the model's checkpoint: expert N has the
modules ``mlp.experts.N.gate_proj``, ``up_proj`` and ``down_proj``, each with a lora_A and a lora_B. Their
rank, and so their scale alpha / rank, differs from the adapter's: ``rank_pattern`` in adapter_config.json
gives it.
"""

import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes  # noqa: F401 - with it NumPy knows the names of types in files, as bfloat16
import numpy as np

from spmd_tx.models.declared.maps import AdapterGroup
from spmd_tx.models.declared.model import Model
from spmd_tx.models.declared.state_shapes import ArrayShape
from spmd_tx.protocol.commands import AdapterSpec

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
TEXT_MODEL = "language_model."  # in the names of a model with vision; hosted Tinker leaves it out
ALIGNMENT = 8  # bytes, of the tensors in a safetensors file
CHECKSUM = "crc32"  # in a file's metadata: of all its tensors, in hexadecimal digits
PIECE_BYTES = 1 << 20  # of a file, read at once
SHARED_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}  # of maps whose outer factors experts share

TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])(\.default)?\.weight")
HEADS = ("lm_head", "unembed_tokens")  # the second is hosted Tinker's
# Of modules that are no part of a text model, or predict further tokens: their factors change no text here.
OTHER_PARTS = re.compile(
    r"(.*\.)?(visual|vision_tower|vision_model|multi_modal_projector|mm_projector|mtp)\..*"
)
# The last two hold the factors of all experts in PEFT (peft_targets.py).
MLP_MODULES = {
    "gate_proj",
    "up_proj",
    "down_proj",
    "gate_up_proj",
    *SHARED_NAMES.values(),
    "experts",
    "base_layer",
}


class AdapterModule(NamedTuple):
    """Describes a module of the file: a linear map, or those of all experts, which share a factor."""

    map: str  # the name in the model
    at: ArrayShape  # the indices of its factors among those of the map in all layers
    name: str  # "base_model.model.model.layers.0.self_attn.q_proj"
    a: ArrayShape  # [rank, in]; with shared factors [experts or 1, rank, in]
    b: ArrayShape  # [out, rank]

    @property
    def shapes(self) -> dict[str, ArrayShape]:
        """The shapes of its tensors, by name."""
        return {self.name_a: self.a, self.name_b: self.b}

    @property
    def name_a(self) -> str:
        return f"{self.name}.lora_A.weight"

    @property
    def name_b(self) -> str:
        return f"{self.name}.lora_B.weight"


def trained_maps(adapter: AdapterSpec, model: Model) -> list[str]:
    """Return the names of the maps that an adapter trains, in the order of declaration."""
    trains = {"attn": adapter.train_attn, "mlp": adapter.train_mlp, "unembed": adapter.train_unembed}
    return [name for name, each in model.adapted.items() if trains[each.group]]


def modules(adapter: AdapterSpec, model: Model) -> Iterator[AdapterModule]:
    """Yield the modules of an adapter's file."""
    for name in trained_maps(adapter, model):
        yield from _modules_of(name, adapter, model)


def _modules_of(name: str, adapter: AdapterSpec, model: Model) -> Iterator[AdapterModule]:
    adapted = model.adapted[name]
    declared, module = adapted.map, PREFIX + adapted.map.adapter_module.replace(TEXT_MODEL, "")
    rank = adapted.rank(adapter.rank)
    a, b = (rank, declared.width_in), (declared.width_out, rank)
    if declared.experts and model.expert_lora == "shared-outer":
        many_a, many_b = (1 if declared.outer_factor == factor else declared.experts for factor in ("a", "b"))
        experts = module.partition("{expert}")[0] + SHARED_NAMES[declared.name]
        for layer, number in enumerate(adapted.numbers or ()):
            yield AdapterModule(name, (layer,), experts.format(layer=number), (many_a, *a), (many_b, *b))
        return
    for index in product(*map(range, adapted.lead("a"))):
        numbers = {} if adapted.numbers is None else {"layer": adapted.numbers[index[0]], "expert": index[-1]}
        yield AdapterModule(name, index, module.format(**numbers), a, b)


def stored_names(tensors: Iterable[str]) -> dict[str, str]:
    """Return the names of a file's tensors, by their names in ``spelling``."""
    return {spelling(name): name for name in tensors}


def spelling(tensor: str) -> str:
    """Return one name for all spellings of a factor's name that libraries and services write."""
    match = TENSOR.fullmatch(tensor)
    if match is None:
        return tensor
    module = match["module"].removeprefix(PREFIX).replace(TEXT_MODEL, "").replace(".attn.", ".self_attn.")
    if module.rpartition(".")[2] in HEADS:
        module = HEADS[0]
    return f"{module}.{match['factor']}"


def group_of_module(module: str) -> AdapterGroup:
    """Return the flag that a module follows, by its name or the last part of it."""
    *_, last = module.split(".")
    if last in HEADS:
        return "unembed"
    return "mlp" if last in MLP_MODULES else "attn"


def groups_of(tensors: Iterable[str]) -> set[AdapterGroup]:
    """Return the flags that the factors in a file follow, by the names of its tensors."""
    matches = (TENSOR.fullmatch(name) for name in tensors)
    modules = {each["module"] for each in matches if each is not None}
    return {group_of_module(module) for module in modules if not OTHER_PARTS.fullmatch(module)}


def alpha_of(lora_alpha: float, rank: int, use_rslora: bool) -> float:
    """Return the alpha that a configuration means where alpha / rank is the scale.

    Rank-stabilised LoRA (Kalajdzievski 2023) scales by alpha / sqrt(rank) instead.
    """
    return lora_alpha * (math.sqrt(rank) if use_rslora else 1.0)


def config_of(adapter: AdapterSpec, model: Model, base_model: str) -> bytes:
    """Return the content of adapter_config.json."""
    names = trained_maps(adapter, model)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": [_last_part(model, name) for name in names],
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    if model.n_experts and adapter.train_mlp and model.expert_lora == "per-expert":
        experts = {
            _last_part(model, name): adapted.rank(adapter.rank)
            for name, adapted in model.adapted.items()
            if adapted.map.experts
        }
        config["rank_pattern"] = {rf"mlp\.experts\.\d+\.{name}": rank for name, rank in experts.items()}
        # With transformers 5, PEFT joins these modules to two parameters, gate and up to one of them.
        for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            config["rank_pattern"][rf"mlp\.experts\.{name}"] = sum(experts.get(part, 0) for part in parts)
    return (json.dumps(config, indent=2) + "\n").encode()


def _last_part(model: Model, name: str) -> str:
    """Return the last part of a module's name, "q_proj"."""
    return model.adapted[name].map.adapter_module.rpartition(".")[2]


def safetensors_header(
    tensors: Iterable[tuple[str, str, ArrayShape, int]], metadata: Mapping[str, str] = MappingProxyType({})
) -> bytes:
    """Return what precedes tensors in a file, from the name, type, shape and bytes of each, in order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, dtype, shape, size in tensors:
        start, end = end, end + size
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def write_tensors(
    file: BinaryIO, shapes: Mapping[str, ArrayShape], tensor: Callable[[str], np.ndarray]
) -> None:
    """Write a safetensors file of float32 as the library does, but one tensor after the other.

    The library builds the whole file in memory, and no other thread runs while it does. The metadata also has
    a checksum.
    """
    described = [(name, "F32", shapes[name], 4 * math.prod(shapes[name])) for name in sorted(shapes)]
    file.write(safetensors_header(described, {CHECKSUM: _digits(0)}))
    checksum = 0
    for name in sorted(shapes):
        content = np.ascontiguousarray(tensor(name), "<f4").reshape(-1).view(np.uint8).data
        file.write(content)
        checksum = zlib.crc32(content, checksum)
    file.seek(0)
    file.write(safetensors_header(described, {CHECKSUM: _digits(checksum)}))


def is_as_written(file: Path, metadata: Mapping[str, str] | None) -> bool:
    """Whether the tensors of a file have the checksum of its metadata; also if there is none. Blocks."""
    expected = (metadata or {}).get(CHECKSUM)
    if expected is None:
        return True
    checksum = 0
    with file.open("rb") as content:
        content.seek(int.from_bytes(content.read(8), "little"), os.SEEK_CUR)
        while piece := content.read(PIECE_BYTES):
            checksum = zlib.crc32(piece, checksum)
    return expected == _digits(checksum)


def _digits(checksum: int) -> str:
    return f"{checksum:08x}"
