import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from spmd_tx.demo import tiny_model
from spmd_tx.demo.tiny_families import FAMILIES, family_named
from spmd_tx.demo.tiny_model import Spec
from spmd_tx.errors import StartError
from spmd_tx.models.base_weights import weights
from spmd_tx.models.checkpoint import huggingface
from spmd_tx.models.config import read_model_config
from spmd_tx.models.declared.tower import MERGE
from spmd_tx.models.families import registry
from spmd_tx.models.vision.tower_weights import tower_weights
from spmd_tx.sharding.mesh import make_mesh


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("tiny"))


def all_weights(path: Path) -> dict[str, np.ndarray]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_the_same_arguments_give_the_same_bytes(tiny, tmp_path, monkeypatch):
    train: Any = tiny_model.train_tokenizer
    monkeypatch.setattr(tiny_model, "train_tokenizer", train.__wrapped__)  # tests share trained ones
    again = tiny_model.write(tmp_path)
    assert {file.name for file in again.iterdir()} == {file.name for file in tiny.iterdir()}
    for file in again.iterdir():
        assert file.read_bytes() == (tiny / file.name).read_bytes(), file.name


def test_another_seed_gives_other_weights(tiny, tmp_path):
    other = all_weights(tiny_model.write(tmp_path, seed=1))
    assert not np.array_equal(
        other["model.embed_tokens.weight"], all_weights(tiny)["model.embed_tokens.weight"]
    )


def test_our_own_reader_understands_the_config(tmp_path):
    spec = Spec(n_layers=3, n_kv_heads=2, rope_theta=5e6, tied=False)
    config = read_model_config(tiny_model.write(tmp_path, spec))
    assert (config.n_layers, config.n_kv_heads, config.attention.rope.theta, config.is_tied) == (
        3,
        2,
        5e6,
        False,
    )


def test_shards_hold_the_same_weights_as_one_file(tiny, tmp_path):
    whole, parts = all_weights(tiny), all_weights(tiny_model.write(tmp_path, Spec(n_shards=3)))
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    assert whole.keys() == parts.keys()
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)


def test_an_untied_model_has_a_head_and_is_otherwise_the_same(tiny, tmp_path):
    untied = all_weights(tiny_model.write(tmp_path, Spec(tied=False)))
    assert untied.keys() - all_weights(tiny).keys() == {"lm_head.weight"}
    assert np.array_equal(untied["model.embed_tokens.weight"], all_weights(tiny)["model.embed_tokens.weight"])


def test_the_dtype_is_honoured(tmp_path):
    weights = all_weights(tiny_model.write(tmp_path, Spec(dtype="bfloat16")))
    assert {tensor.dtype for tensor in weights.values()} == {np.dtype(ml_dtypes.bfloat16)}


def test_any_text_survives_the_tokenizer(tiny):
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    text = "Solaigo 42 sai!\n\tdéjà vu 東京"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert max(ids) < tokenizer.get_vocab_size() == 512


def test_special_tokens_are_single_ids_at_the_end_of_the_vocabulary(tiny):
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert tokenizer.encode("".join(tiny_model.SPECIAL_TOKENS)).ids == [509, 510, 511]


def test_a_vocabulary_without_room_for_every_byte_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a vocabulary of 100 is too small; it must be at least 259"):
        tiny_model.write(tmp_path, replace(Spec(), vocab_size=100))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tensors_of_every_family_are_those_that_its_declaration_reads(tmp_path, family):
    path = tiny_model.write(tmp_path, Spec(family=family, tied=False))
    model, mesh = read_model_config(path), make_mesh(1, 1, 1)
    declared = weights(model, mesh, np.float32)
    loaded = huggingface.load(path, declared, mesh, lambda _: None, model.unread)
    assert loaded.embed.shape == (512, 64)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"])
def test_a_model_that_sees_has_a_tower_and_words_for_images(tmp_path, family):
    path = tiny_model.write(tmp_path, Spec(family=family, sees=True))
    model = read_model_config(path)
    tower = tower_weights(model.tower, np.float32)
    loaded = huggingface.load(path, tower, make_mesh(1, 1, 1), lambda _: None, model.tower.unread)
    assert loaded.once.patch.shape == (32, 3, 2, 16, 16)
    ids = Tokenizer.from_file(str(path / "tokenizer.json")).get_vocab()
    assert json.loads((path / "config.json").read_text())["image_token_id"] == ids["<|image_pad|>"]
    assert json.loads((path / "preprocessor_config.json").read_text())["merge_size"] == MERGE
    parts = [{"type": "text", "text": "What is "}, {"type": "image"}, {"type": "text", "text": "?"}]
    talk = [{"role": "user", "content": parts}, {"role": "assistant", "content": "A bird."}]
    written = jinja2.Template((path / "chat_template.jinja").read_text()).render(messages=talk)
    of_user = "<|im_start|>user\nWhat is <|vision_start|><|image_pad|><|vision_end|>?<|im_end|>\n"
    assert written == of_user + "<|im_start|>assistant\nA bird.<|im_end|>\n"


def test_a_family_without_vision_is_refused_one(tmp_path):
    with pytest.raises(StartError, match="no llama has a vision tower; those of qwen3_5, qwen3_5_moe may"):
        tiny_model.write(tmp_path, Spec(family="llama", sees=True))


def test_there_is_a_tiny_model_of_every_family_that_is_served():
    tiny = {
        registry.FAMILIES[architecture] for raw in FAMILIES.values() for architecture in raw["architectures"]
    }
    assert tiny == set(registry.FAMILIES.values())


@pytest.mark.parametrize(
    "name, family",
    [
        ("qwen3_moe", "qwen3_moe"),
        ("Qwen/Qwen3-VL-8B-Instruct", "qwen3_vl"),
        ("Qwen3-VL-30B-A3B", "qwen3_vl_moe"),
        ("Qwen2.5", "qwen2"),
        ("gpt-oss", "gpt_oss"),
        ("GLM-4.7-Flash", "glm4_moe_lite"),
        ("Kimi-K2", "deepseek_v3"),
        ("moonshotai/Kimi-K2-Instruct-0905", "deepseek_v3"),
        ("DeepSeek-V3.1", "deepseek_v3"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "llama"),
        ("Llama-3.1", "llama"),
        ("meta-llama/Llama-3.2-1B-Instruct", "llama"),
        ("Mistral", "mistral"),
        ("Mistral-7B-Instruct-v0.3", "mistral"),
        ("GLM-4.5-Air", "glm4_moe"),
        ("gpt-oss-20b", "gpt_oss"),
        ("Qwen3-8B", "qwen3"),
        ("Qwen3-30B-A3B-Instruct-2507", "qwen3_moe"),
        ("Qwen3-Coder-480B-A35B-Instruct", "qwen3_moe"),
        ("Qwen3.6-35B-A3B", "qwen3_5_moe"),
        ("Qwen3.5-9B-Base", "qwen3_5"),
        ("Qwen2.5-0.5B", "qwen2"),
        ("SmolLM3-3B", "smollm3"),
    ],
)
def test_families_have_the_names_that_people_use(name, family):
    assert family_named(name) == family


@pytest.mark.parametrize(
    "name", ["bert", "Llama-4-Scout-17B-16E", "Qwen2.5-VL-7B", "Qwen3-Next-80B-A3B", "GLM-4-9B", ""]
)
def test_an_unknown_family_is_answered_with_those_there_are(name):
    with pytest.raises(StartError, match=f"--family is '{name}'; families: qwen3, "):
        family_named(name)
