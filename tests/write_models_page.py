"""Writes the tables of docs/models.md: the families that are served, and plans for known models.

Usage: python -m tests.write_models_page [families | devices | full]
"""

import json
import math
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from spmd_tx.cli.plan import make
from spmd_tx.config import ServerConfig
from spmd_tx.demo.tiny_families import FAMILIES, stored_shapes
from spmd_tx.demo.tiny_model import Spec, model_config
from spmd_tx.errors import StartError
from spmd_tx.models.declared.channels import Mixture
from spmd_tx.models.declared.model import Model
from spmd_tx.models.families.registry import declare
from spmd_tx.worker.memory.accelerators import parse_devices
from tests.support.known_models import CONFIGS

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
COMMAND = "python -m tests.write_models_page"
CONTEXT = 32768  # tokens, or as many as the model takes
FULL_CONTEXT = 8192  # where all weights are trained
TRAINED_BYTES = (
    16 + 3 * 2
)  # per parameter: weight, gradient and two moments in fp32, and three copies in bf16
KINDS = {"h100": "H100", "h200": "H200", "v5p": "TPU v5p"}
COUNTS = (1, 2, 4, 8, 16)
SEES = "[images](#images)"
OFFERED = {  # what to look for on the Hugging Face Hub, and what to know
    "DeepseekV3ForCausalLM": (
        "DeepSeek-V3, V3.1, R1; Kimi-K2, K2.5, K2.6 (`KimiK25ForConditionalGeneration`)",
        "q_b and kv_b stay frozen, as with hosted Tinker; text only",
    ),
    "Glm4MoeForCausalLM": ("GLM-4.5, 4.5-Air, 4.6", ""),
    "Glm4MoeLiteForCausalLM": ("GLM-4.7-Flash", "q_b and kv_b stay frozen"),
    "GptOssForCausalLM": (
        "gpt-oss-20b, gpt-oss-120b",
        "experts in MXFP4 stay so with `--expert-weights packed`",
    ),
    "LlamaForCausalLM": ("Llama 3, 3.1, 3.2 (text), 3.3, and derivatives such as R1-Distill-Llama", ""),
    "Ministral3ForCausalLM": (
        "Ministral 3, as a text model (`Mistral3ForConditionalGeneration`)",
        "no vision; a window only as in Mistral",
    ),
    "MistralForCausalLM": (
        "Mistral 7B, Nemo, Small (also 3.1 and later, `Mistral3ForConditionalGeneration`)",
        "a model with a window is served up to its length",
    ),
    "Phi3ForCausalLM": (
        "Phi-4, Phi-4-reasoning, Phi-4-mini; Phi-3.5-mini, Phi-3 mini and medium",
        "with `longrope` (Phi-4-mini, Phi-3.5, of 128k) up to 4,096 tokens; a window only as in Mistral",
    ),
    "Qwen2ForCausalLM": ("Qwen2, Qwen2.5, R1-Distill-Qwen", "no sliding window"),
    "Qwen3ForCausalLM": ("Qwen3 up to 32B, also with YaRN", ""),
    "Qwen3MoeForCausalLM": ("Qwen3-30B-A3B, 235B-A22B, Coder", "every layer must have experts"),
    "Qwen3VLForConditionalGeneration": ("Qwen3-VL without experts", SEES),
    "Qwen3VLMoeForConditionalGeneration": ("Qwen3-VL-30B-A3B, 235B-A22B", SEES),
    "Qwen3_5ForCausalLM": (
        "Qwen3.5, 3.6, 3.8 without experts (`Qwen3_5ForConditionalGeneration`)",
        f"{SEES}; tensor parallelism up to the heads of keys",
    ),
    "Qwen3_5MoeForCausalLM": (
        "Qwen3.5-35B-A3B, 397B-A17B, 3.6-35B-A3B (`Qwen3_5MoeForConditionalGeneration`)",
        f"{SEES}; the same",
    ),
    "SmolLM3ForCausalLM": ("SmolLM3-3B", "no sliding window"),
}


def page(*names: str) -> str:
    """Return the page with these tables as they are now, or with all."""
    text = PAGE.read_text()
    for name in names or TABLES:
        table = "\n".join(TABLES[name]())
        begin, end = f"<!-- {name}, written by: {COMMAND} -->", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"
    return text


def families() -> list[str]:
    """Return the table of families."""
    rows = ["| `--family` | architecture | models | adapted | to know |", "|---|---|---|---|---|"]
    for family, raw in FAMILIES.items():
        (architecture,) = raw["architectures"]
        assert architecture in OFFERED, f"tests/write_models_page.py: add {architecture} to OFFERED"
        models, note = OFFERED[architecture]
        model = declare(model_config(Spec(family=family), {}))
        rows.append(f"| `{family}` | `{architecture}` | {models} | {_adapted(model)} | {note} |")
    return rows


def _adapted(model: Model) -> str:
    """Return the last parts of the names of adapted maps: those of mixers, then those of channels."""
    maps = [each.map for each in model.adapted.values()]
    attention, channels = (
        ", ".join(
            dict.fromkeys(
                each.adapter_module.rpartition(".")[2].removesuffix("_proj")
                for each in maps
                if each.group == group
            )
        )
        for group in ("attn", "mlp")
    )
    experts = " of experts" if any(each.experts for each in maps) else ""
    shared = ", also shared ones" if any(each.name.startswith("shared_") for each in maps) else ""
    return f"{attention}; {channels}{experts}{shared}"


def devices() -> Iterable[str]:
    """Yield the table of known models."""
    yield f"| model | base weights | {' | '.join(KINDS.values())} |"
    yield "|---|---|" + "---|" * len(KINDS)
    with tempfile.TemporaryDirectory() as folder:
        for name, raw in CONFIGS.items():
            Path(folder, "config.json").write_text(json.dumps(raw))
            model = declare(raw)
            numbers, context = sum(map(math.prod, stored_shapes(model).values())), model.max_positions
            counts = " | ".join(_least(folder, 2 * numbers, kind, min(CONTEXT, context)) for kind in KINDS)
            yield f"| {name} | {2 * numbers / 1e9:.0f} GB | {counts} |"


def full() -> Iterable[str]:
    """Yield the table of models all of whose weights can be trained."""
    yield f"| model | weights in training | {' | '.join(KINDS.values())} |"
    yield "|---|---|" + "---|" * len(KINDS)
    with tempfile.TemporaryDirectory() as folder:
        for name, raw in CONFIGS.items():
            model = replace(declare(raw), tower=None)  # which is not trained
            if any(isinstance(place.layer.channel, Mixture) for place in model.places):
                continue
            Path(folder, "config.json").write_text(json.dumps(raw))
            size = TRAINED_BYTES * sum(map(math.prod, stored_shapes(model).values()))
            of_kinds = (_least(folder, size, kind, FULL_CONTEXT, full_parameters=True) for kind in KINDS)
            counts = " | ".join(of_kinds)
            yield f"| {name} | {size / 1e9:.0f} GB | {counts} |"


def _least(folder: str, size: int, kind: str, context: int, *, full_parameters: bool = False) -> str:
    config = ServerConfig(
        base_model=folder,
        dtype="bfloat16",
        max_context_length=context,
        full_parameters=full_parameters,
    )
    for count in COUNTS:
        these = parse_devices(f"{count}x{kind}", None)
        if size > count * (these.bytes or 0):
            continue  # sooner known than planned
        try:
            make(config, these)
        except StartError:
            continue
        return str(count)
    return "-"


TABLES = {"families": families, "devices": devices, "full": full}

if __name__ == "__main__":
    PAGE.write_text(page(*sys.argv[1:]))
    print(f"wrote {PAGE}")
