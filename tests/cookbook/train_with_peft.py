"""Runs in the cookbook's environment: an adapter as PEFT makes it, and its logits.

Takes a JSON object: the folder ``model``, a new folder ``adapter``, PEFT's ``config``, the ``tokens``, and
the file ``out``, which gets the logits, [T, V].
"""

import json
import sys

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

given = json.loads(sys.argv[1])
torch.manual_seed(0)
base = AutoModelForCausalLM.from_pretrained(
    given["model"], dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
)
model = get_peft_model(base, LoraConfig(**given["config"])).eval()
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:  # which begins as zeros
            parameter.normal_(std=0.1)
    model.save_pretrained(given["adapter"])
    np.save(given["out"], model(torch.tensor([given["tokens"]])).logits[0].float().numpy())
