"""Writes transformers_logits.npz. Needs torch and peft: python -m tests.golden.write_golden

Transformers keeps the experts of a layer in one array, to which peft applies no adapter per expert. So these
are added to the weights here, and peft applies the rest of an adapter.
"""

import tempfile
from pathlib import Path

import msgspec
import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from spmd_tx.demo import tiny_model
from spmd_tx.models.adapter_formats import peft
from spmd_tx.models.config import read_model_config
from tests.golden.cases import CASES, LOGITS, Case, random_adapters


def logits(case: Case, directory: Path) -> np.ndarray:
    path = tiny_model.write(directory / "model", case.spec)
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **how).eval()
    if case.adapter is not None:
        ours = read_model_config(path, case.expert_lora)
        adapters = random_adapters(ours, case.adapter, case.seed)
        for_peft = case.adapter
        if ours.n_experts:
            add_to_experts(model, adapters, case.adapter.expert_scale(ours.expert_rank_divisor))
            for_peft = msgspec.structs.replace(case.adapter, train_mlp=False)
        peft.write(directory / "adapter", adapters, for_peft, ours, str(path))
        model = PeftModel.from_pretrained(model, directory / "adapter").eval()
    with torch.no_grad():
        answer = model(torch.from_numpy(case.tokens.astype(np.int64))[None]).logits[0]
    return answer[list(case.rows)].numpy()


def add_to_experts(model, adapters, scale: float) -> None:
    """W + scale · B A for every expert; a factor that all experts share has no dimension of them."""

    def product(name: str, layer: int) -> torch.Tensor:
        a, b = (
            torch.from_numpy(factor[layer]) for factor in (adapters.layers[name].a, adapters.layers[name].b)
        )
        experts = max(len(factor) for factor in (a, b) if factor.ndim == 3)
        a, b = (factor.expand(experts, *factor.shape[-2:]) for factor in (a, b))
        return scale * torch.einsum("xro,xri->xoi", b, a)

    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            gate, up = product("gate", index), product("up", index)
            layer.mlp.experts.gate_up_proj += torch.cat([gate, up], dim=1)
            layer.mlp.experts.down_proj += product("down", index)


def main() -> None:
    arrays = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as directory:
            arrays[f"{name}/logits"] = logits(case, Path(directory))
        arrays[f"{name}/tokens"] = case.tokens
        arrays[f"{name}/rows"] = np.array(case.rows, np.int32)
        print(name, arrays[f"{name}/logits"].shape, f"std {arrays[f'{name}/logits'].std():.3f}")
    np.savez_compressed(LOGITS, **arrays)


if __name__ == "__main__":
    main()
