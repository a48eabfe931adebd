"""Finds the family of a model by the architecture that its config.json names."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from spmd_tx.models.declared.model import Model
from spmd_tx.models.families import deepseek, glm, gpt_oss, llama, phi, qwen3, qwen3_5, qwen3_vl
from spmd_tx.models.families.encoding import encoded
from spmd_tx.models.families.keys import MOST_SHOWN, ConfigKeys, Refusal

FamilyReader = Callable[[ConfigKeys], Model]

FAMILIES: dict[str, FamilyReader] = {
    "DeepseekV3ForCausalLM": deepseek.latent,
    "Glm4MoeForCausalLM": glm.mixture,
    "Glm4MoeLiteForCausalLM": deepseek.latent,
    "GptOssForCausalLM": gpt_oss.mixture,
    "KimiK25ForConditionalGeneration": deepseek.latent,
    "LlamaForCausalLM": llama.llama,
    "Ministral3ForCausalLM": llama.mistral,
    "Mistral3ForConditionalGeneration": llama.mistral,
    "MistralForCausalLM": llama.mistral,
    "Phi3ForCausalLM": phi.phi3,
    "Qwen2ForCausalLM": llama.qwen2,
    "Qwen3ForCausalLM": qwen3.dense,
    "Qwen3MoeForCausalLM": qwen3.mixture,
    "Qwen3VLForConditionalGeneration": qwen3_vl.dense,
    "Qwen3VLMoeForConditionalGeneration": qwen3_vl.mixture,
    "Qwen3_5ForCausalLM": qwen3_5.dense,
    "Qwen3_5ForConditionalGeneration": qwen3_5.dense,
    "Qwen3_5MoeForCausalLM": qwen3_5.mixture,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5.mixture,
    "SmolLM3ForCausalLM": llama.smollm3,
}


def declare(raw: Mapping[str, Any], *, drafts: bool = False) -> Model:
    """Return the declaration of a model from its config.json, with the layer of ``drafts`` if wanted.

    Raises Refusal.
    """
    keys = ConfigKeys(raw)
    named = keys.names("architectures")
    if not named:
        raise Refusal(f"names no architecture; supported architectures: {', '.join(FAMILIES)}")
    architecture = named[0]
    family = FAMILIES.get(architecture)
    if family is None:
        raise Refusal(_not_served(architecture[:MOST_SHOWN], has_code=keys.has("auto_map")))
    model = encoded(family(keys), keys)
    return model if drafts else replace(model, mtp=None)


def _not_served(architecture: str, *, has_code: bool) -> str:
    """Say what is served instead, the nearest by its name first."""
    nearest = difflib.get_close_matches(architecture, FAMILIES, n=1, cutoff=0.0)[0]
    code = "; its own Python code (auto_map) is never run" if has_code else ""
    supported = ", ".join(FAMILIES)
    return f"holds a {architecture}; supported architectures: {supported} (nearest: {nearest}){code}"
