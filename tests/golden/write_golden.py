"""Writes transformers_logits.npz. Needs torch and peft: python -m tests.golden.write_golden"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from transformers import Qwen3ForCausalLM

from spmd_tx import tiny_model
from spmd_tx.models import peft
from spmd_tx.models.config import read_model_config
from tests.golden.cases import CASES, LOGITS, Case, random_adapters


def logits(case: Case, directory: Path) -> np.ndarray:
    path = tiny_model.write(directory / "model", case.spec)
    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    if case.adapter is not None:
        ours = read_model_config(path)
        adapters = random_adapters(ours, case.adapter, case.seed)
        peft.write(directory / "adapter", adapters, case.adapter, ours, str(path))
        model = PeftModel.from_pretrained(model, directory / "adapter").eval()
    with torch.no_grad():
        answer = model(torch.from_numpy(case.tokens.astype(np.int64))[None]).logits[0]
    return answer[list(case.rows)].numpy()


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
