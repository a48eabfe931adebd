import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spmd_tx.demo import tiny_model
from spmd_tx.errors import StartError
from spmd_tx.models.checkpoint import copies
from spmd_tx.models.checkpoint.copies import check_copies
from spmd_tx.models.checkpoint.files import Files
from spmd_tx.models.config import read_model_config
from spmd_tx.models.declared.unread import Unread

EMBED = "model.embed_tokens.weight"
PREFIXES = ["", "language_model.", "model.", "model.language_model.", "language_model.model."]


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch):
    monkeypatch.setattr(copies, "AT_ONCE", 1000)


def check(path, name, change):
    tiny_model.write(path, tiny_model.Spec(d_model=32))
    tensors = load_file(path / "model.safetensors")
    tensors[name] = change(tensors[EMBED].copy())
    save_file(tensors, path / "model.safetensors")
    declared = read_model_config(path)
    check_copies(Files(path), declared.unread)
    return declared.unread.unknown(Files(path).names - {EMBED, declared.final_norm.name})


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_head_that_is_a_copy_of_what_it_is_tied_to_is_taken(tmp_path, prefix):
    unknown = check(tmp_path, f"{prefix}lm_head.weight", lambda embed: embed)
    assert not any("lm_head" in name for name in unknown)


def test_a_copy_in_another_type_is_one(tmp_path):
    check(tmp_path, "lm_head.weight", lambda embed: embed.astype(np.float64))


def one_number(embed):
    embed[-1, -1] += 1
    return embed


def rounded(embed):
    return embed.astype(ml_dtypes.float8_e5m2).astype(np.float32)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(
    "change",
    [
        one_number,
        lambda embed: embed[:-1],
        lambda embed: embed.astype(ml_dtypes.float8_e5m2).astype(np.float32),
    ],
    ids=["number", "rows", "rounded"],
)
def test_a_head_of_its_own_is_refused_with_the_remedy(tmp_path, prefix, change):
    with pytest.raises(StartError, match=rf"{prefix}lm_head.weight, which differs from {EMBED}.* to false"):
        check(tmp_path, f"{prefix}lm_head.weight", change)


def test_a_head_that_nothing_ties_is_no_copy():
    assert Unread().unknown(["lm_head.weight"]) == ["lm_head.weight"]


def test_a_layer_behind_the_last_is_left_out_only_if_it_predicts_further_tokens():
    unread = Unread(further=("model.layers.3.",))
    names = [f"model.layers.3.{each}.weight" for each in ("self_attn.q_proj", "mlp.gate_proj")]
    assert unread.unknown(names) == sorted(names)
    assert unread.unknown([*names, "model.layers.3.eh_proj.weight"]) == []
    assert unread.unknown(["model.layers.30.eh_proj.weight"]) == ["model.layers.30.eh_proj.weight"]
