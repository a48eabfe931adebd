import dataclasses
import json
import re
import zlib

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spmd_tx.demo import tiny_model
from spmd_tx.errors import DamagedWeights, ForeignWeights, MeshError
from spmd_tx.models.adapter_formats import files as adapter_files
from spmd_tx.models.adapter_formats import peft
from spmd_tx.models.adapters.lora import Adapters, Lora, for_maps, shapes
from spmd_tx.models.config import read_model_config
from spmd_tx.models.families.registry import declare
from spmd_tx.protocol.commands import AdapterSpec
from tests.support import known_models

SPEC = tiny_model.Spec(n_layers=2, d_model=32, n_kv_heads=2, d_ff=48, vocab_size=272, tied=False)
MAX_RANK = 6
WHOLE = AdapterSpec(rank=4, alpha=10.0)
MIXTURE = dataclasses.replace(SPEC, d_ff=24, n_experts=4, experts_per_token=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("model"), SPEC)


@pytest.fixture
def model(checkpoint):
    return read_model_config(checkpoint)


@pytest.fixture
def mixture(tmp_path):
    return read_model_config(tiny_model.write(tmp_path / "mixture", MIXTURE), "per-expert")


def random_adapters(model, rank=MAX_RANK, seed=0):
    random = np.random.default_rng(seed)

    def pair(name):
        its = shapes(model, name, rank)
        return Lora(*(0.3 * random.standard_normal(shape).astype(np.float32) for shape in (its.a, its.b)))

    return for_maps(model, pair)


def expected_of(adapters, adapter, rank=MAX_RANK):
    """What reading brings back: zero beyond the rank, and where nothing was trained."""

    def factor(x, is_trained):
        active = MIXTURE.experts_per_token if x.ndim == 4 else 1  # [L, X, R, width]
        kept = np.zeros((*x.shape[:-2], rank // active, x.shape[-1]), np.float32)
        if is_trained:
            used = max(1, adapter.rank // active)
            kept[..., :used, :] = x[..., :used, :]
        return kept

    def pair(lora, is_trained):
        return Lora(factor(lora.a, is_trained), factor(lora.b, is_trained))

    layers = {
        name: pair(lora, adapter.train_attn if name in "qkvo" else adapter.train_mlp)
        for name, lora in adapters.layers.items()
    }
    return Adapters(layers, pair(adapters.head, adapter.train_unembed))


@pytest.mark.parametrize(
    "adapter",
    [
        WHOLE,
        AdapterSpec(rank=MAX_RANK),
        AdapterSpec(rank=1, train_attn=False),
        AdapterSpec(rank=4, train_mlp=False, train_unembed=False),
    ],
)
def test_an_adapter_comes_back_without_what_was_not_trained(tmp_path, model, adapter):
    adapters = random_adapters(model)
    peft.write(tmp_path / "adapter", adapters, adapter, model, "some/model")
    for rank in (MAX_RANK, 9):
        jax.tree.map(
            np.testing.assert_array_equal,
            peft.read(tmp_path / "adapter", adapter, model, rank),
            expected_of(adapters, adapter, rank),
        )


def test_the_file_is_that_of_the_library_but_for_a_checksum(tmp_path, mixture):
    for name, model in (("dense", None), ("mixture", mixture)):
        model = model or read_model_config(tiny_model.write(tmp_path / "model", SPEC))
        peft.write(tmp_path / name, random_adapters(model), WHOLE, model, "some/model")
        file = tmp_path / name / peft.WEIGHTS_FILE
        save_file(load_file(file), tmp_path / "library", metadata={"format": "pt"})
        (header, content), (expected, same) = header_of(file), header_of(tmp_path / "library")
        assert header.pop("__metadata__") == {"format": "pt", "crc32": f"{zlib.crc32(same):08x}"}
        assert header == {key: value for key, value in expected.items() if key != "__metadata__"}
        assert content == same


def header_of(file):
    """The header of a safetensors file, and what is behind it."""
    stored = file.read_bytes()
    end = 8 + int.from_bytes(stored[:8], "little")
    return json.loads(stored[8:end]), stored[end:]


def test_no_bit_of_the_weights_may_flip(tmp_path, model):
    peft.write(tmp_path / "adapter", random_adapters(model), WHOLE, model, "some/model")
    file = tmp_path / "adapter" / peft.WEIGHTS_FILE
    stored = file.read_bytes()
    random, first = np.random.default_rng(0), 8 + int.from_bytes(stored[:8], "little")
    for place in (first, len(stored) - 1, *random.integers(first, len(stored), 30)):
        damaged = bytearray(stored)
        damaged[place] ^= 1 << int(random.integers(8))
        file.write_bytes(damaged)
        with pytest.raises(DamagedWeights, match=r"adapter_model.safetensors is damaged: "):
            peft.read(tmp_path / "adapter", WHOLE, model, MAX_RANK)


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_half_a_file_is_damaged(tmp_path, model, size):
    peft.write(tmp_path / "adapter", random_adapters(model), WHOLE, model, "some/model")
    file = tmp_path / "adapter" / peft.WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(DamagedWeights, match=r"adapter_model.safetensors is damaged: "):
        peft.read(tmp_path / "adapter", WHOLE, model, MAX_RANK)


def test_the_folder_is_what_peft_expects(tmp_path, model):
    adapters = random_adapters(model)
    peft.write(tmp_path / "adapter", adapters, WHOLE, model, "some/model")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "some/model",
        "r": 4,
        "lora_alpha": 10.0,
        "target_modules": "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj lm_head".split(),
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1.self_attn.k_proj"
    np.testing.assert_array_equal(tensors[f"{prefix}.lora_A.weight"], adapters.layers["k"].a[1, :4])
    np.testing.assert_array_equal(tensors[f"{prefix}.lora_B.weight"], adapters.layers["k"].b[1, :4].T)
    assert tensors["base_model.model.lm_head.lora_B.weight"].shape == (272, 4)
    assert len(tensors) == 2 * (2 * 7 + 1)
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize("rank, share", [(1, 1), (3, 1), (4, 2), (6, 3)])
def test_experts_are_modules_with_their_share_of_the_rank(tmp_path, mixture, rank, share):
    adapters, adapter = random_adapters(mixture), AdapterSpec(rank=rank)
    peft.write(tmp_path / "adapter", adapters, adapter, mixture, "some/model")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1.mlp.experts.3.down_proj"
    down = adapters.layers["down"]
    np.testing.assert_array_equal(tensors[f"{prefix}.lora_A.weight"], down.a[1, 3, :share])
    np.testing.assert_array_equal(tensors[f"{prefix}.lora_B.weight"], down.b[1, 3, :share].T)
    assert len(tensors) == 2 * (2 * (4 + 4 * 3) + 1)

    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    module = prefix.removeprefix("base_model.model.")
    ranks = {r for key, r in config["rank_pattern"].items() if re.match(rf"(.*\.)?({key})$", module)}
    assert ranks == {share}
    jax.tree.map(
        np.testing.assert_array_equal,
        peft.read(tmp_path / "adapter", adapter, mixture, MAX_RANK),
        expected_of(adapters, adapter),
    )


def test_experts_that_share_outer_factors_are_written_as_hosted_ones(tmp_path, mixture):
    model = dataclasses.replace(mixture, expert_lora="shared-outer")
    adapters, adapter = random_adapters(model), AdapterSpec(rank=3)
    peft.write(tmp_path / "adapter", adapters, adapter, model, "some/model")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    experts, inner, width = MIXTURE.n_experts, MIXTURE.d_ff, MIXTURE.d_model
    shapes = {
        "w1": ((1, 3, width), (experts, inner, 3)),
        "w3": ((1, 3, width), (experts, inner, 3)),
        "w2": ((experts, 3, inner), (1, width, 3)),
    }
    for module, (of_a, of_b) in shapes.items():
        prefix = f"base_model.model.model.layers.1.mlp.experts.{module}"
        assert tensors[f"{prefix}.lora_A.weight"].shape == of_a
        assert tensors[f"{prefix}.lora_B.weight"].shape == of_b
    down = tensors["base_model.model.model.layers.1.mlp.experts.w2.lora_A.weight"]
    np.testing.assert_array_equal(down, adapters.layers["down"].a[1, :, :3])
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert "rank_pattern" not in config
    read = peft.read(tmp_path / "adapter", adapter, model, MAX_RANK)
    for name, factors in read.layers.items():
        for mine, given in ((factors.a, adapters.layers[name].a), (factors.b, adapters.layers[name].b)):
            np.testing.assert_array_equal(mine[..., :3, :], given[..., :3, :])
            assert not mine[..., 3:, :].any()


def test_only_trained_modules_are_in_the_folder(tmp_path, model):
    adapter = AdapterSpec(rank=2, train_mlp=False, train_unembed=False)
    peft.write(tmp_path / "adapter", random_adapters(model), adapter, model, "some/model")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert len(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) == 2 * 2 * 4


def test_an_earlier_folder_is_replaced_and_nothing_else_is_left(tmp_path, model):
    for seed in (1, 2):
        peft.write(
            tmp_path / "new" / "adapter", random_adapters(model, seed=seed), WHOLE, model, "some/model"
        )
        (tmp_path / "new" / "adapter" / f"note-{seed}").touch()
    jax.tree.map(
        np.testing.assert_array_equal,
        peft.read(tmp_path / "new" / "adapter", WHOLE, model, MAX_RANK),
        expected_of(random_adapters(model, seed=2), WHOLE),
    )
    names = sorted(path.name for path in (tmp_path / "new").rglob("*"))
    assert names == ["adapter", "adapter_config.json", "adapter_model.safetensors", "note-2"]


def rewrite(folder, change):
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


KEY = "base_model.model.lm_head.lora_A.weight"


@pytest.mark.parametrize(
    "change, error, message",
    [
        (lambda tensors: tensors[KEY].fill(np.nan), DamagedWeights, "lm_head.lora_A.weight is not finite"),
        (
            lambda tensors: tensors.update({KEY: np.zeros((5, 32), np.float32)}),
            ForeignWeights,
            r"\[5, 32\]; in this base model it is \[4, 32\]",
        ),
        (lambda tensors: tensors.pop(KEY), ForeignWeights, "there is no lm_head.A"),
        (
            lambda tensors: tensors.update({KEY.replace("lm_head", "other"): tensors[KEY]}),
            ForeignWeights,
            "has no .*other.A",
        ),
    ],
)
def test_a_folder_with_other_contents_is_an_error(tmp_path, model, change, error, message):
    peft.write(tmp_path / "adapter", random_adapters(model), WHOLE, model, "some/model")
    rewrite(tmp_path / "adapter", change)
    with pytest.raises(error, match=message):
        peft.read(tmp_path / "adapter", WHOLE, model, MAX_RANK)


@pytest.mark.parametrize("family", ["dense", "mixture"])
def test_every_spelling_of_a_name_is_read(tmp_path, checkpoint, family):
    path = checkpoint if family == "dense" else tiny_model.write(tmp_path / "mixture", MIXTURE)
    model = read_model_config(path)
    adapters = random_adapters(model)
    peft.write(tmp_path / "adapter", adapters, WHOLE, model, "some/model")

    def spell(tensors):
        for name in list(tensors):
            other = name.removeprefix("base_model.model.").replace("self_attn", "attn")
            other = other.replace("lm_head", "model.unembed_tokens").replace(".weight", ".default.weight")
            tensors[other.replace("model.layers", "model.language_model.layers")] = tensors.pop(name)

    expected = peft.read(tmp_path / "adapter", WHOLE, model, MAX_RANK)
    rewrite(tmp_path / "adapter", spell)
    jax.tree.map(
        np.testing.assert_array_equal, peft.read(tmp_path / "adapter", WHOLE, model, MAX_RANK), expected
    )


def test_the_text_model_of_a_model_with_vision_has_the_names_of_a_text_model():
    model = declare(known_models.CONFIGS["Qwen/Qwen3.5-9B"])
    named = {module.name: module.map for module in adapter_files.modules(WHOLE, model)}
    assert model.layer_prefix.startswith("model.language_model.")
    at = "base_model.model.model.layers."
    assert {f"{at}0.linear_attn.in_proj_q", f"{at}3.self_attn.q_proj", "base_model.model.lm_head"} <= set(
        named
    )
    assert not any("language_model" in name for name in named)


def test_a_folder_that_is_not_there_is_an_error(tmp_path, model):
    with pytest.raises(MeshError, match=r"cannot read .*nowhere"):
        peft.read(tmp_path / "nowhere", WHOLE, model, MAX_RANK)


@pytest.mark.filterwarnings("default")  # torch and peft are not ours to keep quiet
@pytest.mark.parametrize("tied", [False, True])
def test_peft_adds_what_the_adapter_means(tmp_path, tied):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peft_library = pytest.importorskip("peft")
    path = tiny_model.write(tmp_path / "model", dataclasses.replace(SPEC, tied=tied))
    model = read_model_config(path)
    adapters = random_adapters(model)
    peft.write(tmp_path / "adapter", adapters, WHOLE, model, str(path))

    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    adapted = peft_library.PeftModel.from_pretrained(base, tmp_path / "adapter")

    tokens = torch.arange(12)[None]
    expected = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for layer in range(model.n_layers):
            for name, lora in adapters.layers.items():
                module = model.adapted[name].map.adapter_module.format(layer=layer)
                module = expected.get_submodule(module)
                a, b = torch.from_numpy(lora.a[layer, :4]), torch.from_numpy(lora.b[layer, :4])
                module.weight += WHOLE.scale * (b.T @ a)
        head_a, head_b = torch.from_numpy(adapters.head.a[:4]), torch.from_numpy(adapters.head.b[:4])
        hidden = expected.model(tokens).last_hidden_state
        logits = hidden @ (expected.lm_head.weight + WHOLE.scale * (head_b.T @ head_a)).T
        np.testing.assert_allclose(adapted(tokens).logits, logits, rtol=2e-4, atol=2e-4)
