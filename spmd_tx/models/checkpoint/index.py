"""Reads which file of a Hugging Face checkpoint holds which tensor. No JAX: the coordinator reads it too."""

import json
import re
from pathlib import Path

from spmd_tx.errors import StartError

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
FILE_NAME = re.compile(r"[ -.0-~]{1,200}\.safetensors")  # of ASCII, without a folder
AGAIN = "restore it from where the model came from"


def weight_files(model_dir: Path) -> list[str]:
    """The names of the files with the weights, whether they are there or not. Raises StartError.

    As with transformers, a single file goes before an index, which is then of an earlier save.
    """
    index = model_dir / INDEX_FILE
    if (model_dir / SINGLE_FILE).exists() or not index.exists():
        return [SINGLE_FILE]
    return sorted(set(read_index(index).values()))


def read_index(index: Path) -> dict[str, str]:
    """Return the name of each tensor's file, which is in the folder of the index. Raises StartError."""
    try:
        index_json = json.loads(index.read_bytes())
    except OSError as problem:
        raise StartError(f"cannot read {index}: {problem.strerror}; {AGAIN}") from None
    except (ValueError, RecursionError) as problem:
        raise StartError(f"{index} is not a safetensors index: {problem}; {AGAIN}") from None
    weight_map = index_json.get("weight_map") if isinstance(index_json, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise StartError(f"{index} is not a safetensors index: its weight_map names no tensors; {AGAIN}")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not FILE_NAME.fullmatch(file):
            raise StartError(
                f"{index} says that {tensor!r:.200} is in {file!r:.200}, which is not the name of a "
                f"safetensors file beside it; {AGAIN}"
            )
    return weight_map
