"""Writes transformers_parts.npz. Needs torch and transformers: python -m tests.golden.write_parts"""

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from tests.golden import parts
from tests.golden.parts import AttentionCase, RopeCase, RouteCase


def named(path: str) -> Any:
    module, name = path.split(":")
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)


def rotary(model_type: str, config: Any) -> Any:
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    (name,) = (name for name in dir(module) if name.endswith("RotaryEmbedding"))
    return getattr(module, name)(config)


def angles(model_type: str, config: Any, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    return rotary(model_type, config)(torch.zeros(1), torch.from_numpy(positions)[None])


def rope(case: RopeCase) -> np.ndarray:
    config = AutoConfig.for_model(case.model_type, **case.config)
    found = angles(case.model_type, config, parts.POSITIONS)
    pairs = rotary(case.model_type, config).inv_freq.shape[0]
    return np.stack([part[0, :, :pairs].numpy() for part in found])


def growth(case: RopeCase) -> np.ndarray:
    from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

    given = case.config["rope_parameters"]
    positions = torch.from_numpy(parts.POSITIONS)[None]
    span = given["original_max_position_embeddings"]
    return get_llama_4_attn_scale(positions, given["llama_4_scaling_beta"], span)[0, 0, :, 0].numpy()


def load(module: Any, weights: dict[str, np.ndarray]) -> Any:
    module.load_state_dict({name: torch.from_numpy(x) for name, x in weights.items()}, strict=True)
    return module.eval()


def route(case: RouteCase) -> tuple[np.ndarray, np.ndarray]:
    config = SimpleNamespace(**{"num_local_experts": parts.ROUTED_EXPERTS, **case.config})
    _, weights, choices = load(named(case.module)(config), case.weights)(torch.from_numpy(case.inputs))
    gates = torch.zeros(parts.ROUTED_TOKENS, parts.ROUTED_EXPERTS).scatter_(1, choices, weights)
    return np.sort(choices.numpy().astype(np.int32), axis=1), gates.numpy()


def attention(case: AttentionCase) -> np.ndarray:
    config = AutoConfig.for_model(case.model_type, attn_implementation="eager", **case.config)
    module = load(named(case.module)(config, case.layer), case.weights)
    x = torch.from_numpy(case.inputs)[None]
    positions = torch.from_numpy(case.positions)[None].long()
    make = create_sliding_window_causal_mask if case.window else create_causal_mask
    mask = make(
        config=config, inputs_embeds=x, attention_mask=None, past_key_values=None, position_ids=positions
    )
    cos, sin = angles(case.model_type, config, case.positions)
    keys = {"position_ids": positions} if case.model_type == "mistral4" else {}
    return module(x, (cos, sin), mask, **keys)[0][0].numpy()


def main() -> None:
    arrays = {f"rope/{name}": rope(case) for name, case in parts.ROPES.items()}
    arrays |= {f"growth/{name}": growth(parts.ROPES[name]) for name in parts.GROWING}
    for name, case in parts.ROUTES.items():
        arrays[f"route/{name}/choices"], arrays[f"route/{name}/gates"] = route(case)
    arrays |= {f"attention/{name}": attention(case) for name, case in {**parts.LATENT, **parts.SINKS}.items()}
    gate_up = torch.from_numpy(parts.GATED)
    of_gpt_oss = SimpleNamespace(alpha=1.702, limit=7.0)
    arrays["activation/clamped_swiglu"] = GptOssExperts._apply_gate(of_gpt_oss, gate_up).numpy()
    arrays["activation/gelu_tanh"] = torch.nn.functional.gelu(gate_up, approximate="tanh").numpy()
    blocks, scales = torch.from_numpy(parts.MXFP4_BLOCKS), torch.from_numpy(parts.MXFP4_SCALES)
    arrays["mxfp4"] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).numpy()
    codes = torch.from_numpy(parts.FP8_CODES).view(torch.float8_e4m3fn)
    fp8 = Fp8Dequantize(None)._dequantize_one(codes, torch.from_numpy(parts.FP8_SCALES), torch.float32)
    arrays["fp8"] = fp8.numpy()
    np.savez_compressed(parts.PARTS, **arrays)
    print({name: (x.shape, float(np.abs(x).max())) for name, x in arrays.items()})


if __name__ == "__main__":
    with torch.no_grad():
        main()
