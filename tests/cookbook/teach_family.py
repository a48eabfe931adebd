"""Runs in the cookbook's environment: teaches a tiny random model of any family the form of answers.

Takes a JSON object: the folder ``model``, which is written again, and ``taught``, the folder of a model of
the offline hub, whose tokenizer it gets.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from offline_model import pretrain, rows_of_lessons
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

given = json.loads(sys.argv[1])
folder, taught = Path(given["model"]), Path(given["taught"])
torch.manual_seed(0)
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, pad_token_id=0)
config = json.loads((folder / "config.json").read_text())
pretrain(model, rows_of_lessons(Tokenizer.from_file(str(taught / "tokenizer.json"))))
model.save_pretrained(folder)
of_taught = json.loads((taught / "config.json").read_text())
config |= {name: of_taught[name] for name in ("bos_token_id", "eos_token_id")}
(folder / "config.json").write_text(json.dumps(config))
for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
    shutil.copy(taught / name, folder / name)
(folder / "chat_template.jinja").unlink()
