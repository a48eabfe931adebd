"""Runs in the cookbook's environment: the logits of one adapter in all forms in which it was written.

Takes a JSON object: the folders ``model``, ``merged``, ``own``, ``peft`` and ``tinker``, a new folder
``work``, the ``tokens``, and the file ``out``, which gets the logits of each form, [T, V]. A form that a
library refuses has its message instead.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from tinker_cookbook.weights import build_hf_model, build_lora_adapter
from transformers import AutoModelForCausalLM

given = json.loads(sys.argv[1])
work = Path(given["work"])
tokens = torch.tensor([given["tokens"]])


def whole(folder: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )


def with_peft(folder: str) -> torch.nn.Module:
    return PeftModel.from_pretrained(whole(given["model"]), folder)


def merged_by_cookbook() -> torch.nn.Module:
    place = str(work / "merged")
    build_hf_model(base_model=given["model"], adapter_path=given["tinker"], output_path=place)
    return whole(place)


def converted_by_cookbook() -> torch.nn.Module:
    place = str(work / "converted")
    build_lora_adapter(base_model=given["model"], adapter_path=given["tinker"], output_path=place)
    return with_peft(place)


forms: dict[str, Callable[[], torch.nn.Module]] = {
    "merged": lambda: whole(given["merged"]),
    "own": lambda: with_peft(given["own"]),
    "peft": lambda: with_peft(given["peft"]),
    "build_hf_model": merged_by_cookbook,
    "build_lora_adapter": converted_by_cookbook,
}
found = {}
for name, load in forms.items():
    try:
        with torch.no_grad():
            found[name] = load().eval()(tokens).logits[0].float().numpy()
    except Exception as error:
        found[name] = np.array(f"{type(error).__name__}: {error}"[:600])
np.savez(given["out"], **found)
