"""``spmd-tx import`` says what is wrong with a folder before it asks a server."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spmd_tx.cli.import_weights import lora_config, upload
from spmd_tx.cli.server import Server
from spmd_tx.errors import StartError
from spmd_tx.models.adapter_formats.files import CONFIG_FILE, WEIGHTS_FILE
from spmd_tx.protocol.commands import AdapterSpec
from tests.support.adapter_folders import write_folder
from tests.support.model_shapes import TINY

DEEP = "[" * 100_000


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "sent", AdapterSpec(rank=4, train_mlp=False), TINY, "Qwen/Qwen3-0.6B")


def test_what_is_announced_is_what_the_files_have(folder):
    expected = {"rank": 4, "train_attn": True, "train_mlp": False, "train_unembed": True}
    assert lora_config(folder) == expected


@pytest.mark.parametrize(
    "config, message",
    [
        ("[]", "is not a PEFT folder, or is damaged"),
        (DEEP, "is not a PEFT folder, or is damaged"),
        ('{"r": "8"}', "r of .*adapter_config.json is '8'; it must be a whole number"),
        ('{"r": 1e999}', "r of .* is inf"),
    ],
    ids=["list", "deep", "text", "infinite"],
)
def test_a_damaged_configuration_is_refused(folder, config, message):
    (folder / CONFIG_FILE).write_text(config)
    with pytest.raises(StartError, match=message):
        lora_config(folder)


@pytest.mark.parametrize(
    "header, message",
    [
        ("5", "is not a PEFT folder, or is damaged"),
        (DEEP, "is not a PEFT folder, or is damaged"),
        (json.dumps({"weight": 0}), "adapter_model.safetensors has no factors"),
    ],
    ids=["number", "deep", "other"],
)
def test_a_damaged_header_is_refused(folder, header, message):
    (folder / WEIGHTS_FILE).write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(StartError, match=message):
        lora_config(folder)


def test_a_header_of_impossible_length_is_told_with_both_lengths(folder):
    (folder / WEIGHTS_FILE).write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(StartError, match=f"its header has {1 << 60} bytes, and the whole file has 10"):
        lora_config(folder)


def test_what_text_does_not_use_is_not_announced(folder):
    names = ["model.visual.blocks.0.mlp.up_proj", "vision_tower.layers.0.fc1", "mtp.layers.0.mlp.up_proj"]
    save_file(
        load_file(folder / WEIGHTS_FILE)
        | {f"base_model.model.{name}.lora_A.weight": np.zeros((2, 2)) for name in names},
        folder / WEIGHTS_FILE,
    )
    assert not lora_config(folder)["train_mlp"]


def test_an_address_that_is_none_is_refused():
    with pytest.raises(StartError, match=r"--url is 'http://\[::1', which is no address"):
        Server("http://[::1", "")


@pytest.mark.parametrize("answer", [[], {"supported_models": []}])
def test_a_server_of_another_kind_is_refused(folder, monkeypatch, answer):
    monkeypatch.setattr(Server, "ask", lambda *_: answer)
    with pytest.raises(StartError, match="names no base model; is it the address of spmd_tx"):
        upload(Server("http://127.0.0.1:9", ""), folder)
