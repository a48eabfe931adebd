"""Adapters written for PEFT and as hosted Tinker does mean the same as those that they are made from."""

import json
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from spmd_tx.cli.main import app
from spmd_tx.errors import StartError
from spmd_tx.exports.adapter_formats import export_adapter
from spmd_tx.exports.merged import export_merged
from spmd_tx.models.checkpoint.files import SINGLE_FILE
from spmd_tx.models.config import read_model_config
from spmd_tx.protocol.commands import AdapterSpec
from tests.golden import families
from tests.support.adapter_folders import write_folder

ADAPTER = AdapterSpec(rank=6, alpha=12.0)
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
LAYOUTS = [(family, "shared-outer") for family in families.CONFIGS]
LAYOUTS += [(family, "per-expert") for family in ("glm4_moe", "gpt_oss", "qwen3_5_moe")]


@pytest.fixture(params=LAYOUTS, ids="-".join)
def made(tmp_path, request):
    """A base model, an adapter of it, and what both are merged."""
    family, layout = request.param
    path = families.write(tmp_path / "model", family)
    folder = write_folder(tmp_path / "adapter", ADAPTER, read_model_config(path, layout), "tiny")
    export_merged(folder, path, tmp_path / "merged", None)
    return family, path, folder, load_file(tmp_path / "merged" / SINGLE_FILE)


def test_hosted_files_are_read_as_the_same_adapter(tmp_path, made):
    family, path, folder, merged = made
    export_adapter(folder, path, tmp_path / "hosted", "tinker")
    names = load_file(tmp_path / "hosted" / WEIGHTS).keys()
    assert "base_model.model.model.unembed_tokens.lora_A.weight" in names
    assert any(".attn." in name for name in names) == (family == "gpt_oss")
    assert not any(re.search(r"experts\.\d|lm_head", name) for name in names)
    if any(".experts.0." in name for name in load_file(folder / WEIGHTS)):
        check_stacked(load_file(tmp_path / "hosted" / WEIGHTS), load_file(folder / WEIGHTS))
        return
    export_merged(tmp_path / "hosted", path, tmp_path / "again", None)
    again = load_file(tmp_path / "again" / SINGLE_FILE)
    assert again.keys() == merged.keys()
    for name, tensor in merged.items():
        np.testing.assert_allclose(again[name], tensor, rtol=0, atol=1e-6, err_msg=name)


def check_stacked(hosted, own):
    """Experts' own factors are stacked, and have the adapter's scale instead of that of their lower rank."""
    for module in [name for name in hosted if re.search(r"w[123]\.lora_A", name)]:
        a, b = hosted[module], hosted[module.replace("lora_A", "lora_B")]
        name = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}[module.split(".")[-3]]
        for expert in range(len(a)):
            at = f"{module.partition('.experts.')[0]}.experts.{expert}.{name}"
            its_a, its_b = (own[f"{at}.lora_{factor}.weight"] for factor in "AB")
            expected = ADAPTER.alpha / len(its_a) * its_b @ its_a
            np.testing.assert_allclose(ADAPTER.scale * b[expert] @ a[expert], expected, atol=1e-5)


def pattern(patterns, key, default):
    """The value for a module, as peft finds it (get_pattern_key)."""
    return next((v for k, v in patterns.items() if re.match(rf"(.*\.)?({k})$", key)), default)


def test_what_peft_adds_is_what_merging_adds(tmp_path, made):
    family, path, folder, merged = made
    export_adapter(folder, path, tmp_path / "peft", "peft")
    config, base = json.loads((tmp_path / "peft" / CONFIG).read_bytes()), load_file(path / SINGLE_FILE)
    factors, seen = load_file(tmp_path / "peft" / WEIGHTS), set()
    for name, a in factors.items():
        if ".lora_B" in name:
            continue
        b = factors[name.replace("lora_A", "lora_B")]
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        experts = module.removesuffix(".base_layer").endswith("mlp.experts")
        if experts:
            parameter = "gate_up_proj" if module.endswith(".base_layer") else "down_proj"
            module = f"{module.removesuffix('.base_layer')}.{parameter}"
            assert any(module.endswith(f".{each}") for each in config["target_parameters"])
        elif module.rpartition(".")[2] not in config["target_modules"]:
            assert any(f"{module}.weight".endswith(f".{each}") for each in config["target_parameters"])
        rank = pattern(config["rank_pattern"], module, config["r"])
        scale = pattern(config["alpha_pattern"], module, config["lora_alpha"]) / rank
        a, b = a.reshape(-1, rank, a.shape[-1]), b.reshape(len(b), rank, -1)
        delta = scale * np.einsum("ore,eri->eoi", b, a)
        for stored, part in changed(family, module, delta if experts else delta[0], merged):
            was = base[stored] if stored in base else base["model.embed_tokens.weight"]
            np.testing.assert_allclose(was + part, merged[stored], rtol=0, atol=2e-6, err_msg=stored)
            seen.add(stored)
    assert seen == {name for name in merged if name not in base or (merged[name] != base[name]).any()}


def changed(family, module, delta, merged):
    """The tensors of the checkpoint that one of transformers is made of, with their parts of the delta."""
    if module in merged:  # one parameter in both
        yield module, delta.swapaxes(-1, -2) if family == "gpt_oss" else delta
    elif f"{module}.weight" in merged:
        yield f"{module}.weight", delta
    else:
        at, _, parameter = module.rpartition(".")
        names = ["gate_proj", "up_proj"] if parameter == "gate_up_proj" else [parameter]
        for number, of_expert in enumerate(delta):
            for name, part in zip(names, np.split(of_expert, len(names)), strict=True):
                yield f"{at}.{number}.{name}.weight", part


def test_from_the_command_line(tmp_path):
    path = families.write(tmp_path / "model", "qwen2")
    (path / "tokenizer.json").write_text("{}")
    folder = write_folder(tmp_path / "adapter", ADAPTER, read_model_config(path), str(path))
    arguments = ["export", str(folder), "--format", "tinker", "--out", str(tmp_path / "out")]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    config = json.loads((tmp_path / "out" / CONFIG).read_bytes())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (6, 12.0, str(path))
    with pytest.raises(StartError, match="exists already"):
        export_adapter(folder, path, tmp_path / "out", "tinker")
    refused = CliRunner().invoke(app, [*arguments[:-1], str(tmp_path / "other"), "--dtype", "float16"])
    assert refused.exit_code != 0
    assert not (tmp_path / "other").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from spmd_tx.exports import adapter_formats
from spmd_tx.exports.adapter_formats import export_adapter
adapter, model, out, form, where = sys.argv[1:]
def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)
class Half(adapter_formats.AdapterFolder):
    reads = 0
    def factors(self, *arguments):
        self.reads += 1
        return super().factors(*arguments) if self.reads < 9 else kill()
if where == "half":
    adapter_formats.AdapterFolder = Half
else:
    adapter_formats.CONFIG_FILE = type("Name", (), {"__rtruediv__": kill})()
export_adapter(Path(adapter), Path(model), Path(out), form)
"""


@pytest.mark.parametrize("form, where", [("peft", "half"), ("tinker", "config")])
def test_an_export_that_was_killed_is_not_there_and_can_be_repeated(tmp_path, form, where):
    path = families.write(tmp_path / "model", "qwen2")
    folder = write_folder(tmp_path / "adapter", ADAPTER, read_model_config(path), "tiny")
    arguments = [folder, path, tmp_path / "out", form, where]
    killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert sorted(each.name for each in tmp_path.iterdir()) == ["adapter", "model", "out.partial"]
    other = "tinker" if form == "peft" else "peft"
    with pytest.raises(StartError, match="begin of another export"):
        export_adapter(folder, path, tmp_path / "out", other)
    export_adapter(folder, path, tmp_path / "out", form)
    export_adapter(folder, path, tmp_path / "whole", form)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["adapter", "model", "out", "whole"]
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == [CONFIG, WEIGHTS]
    for name in (CONFIG, WEIGHTS):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
