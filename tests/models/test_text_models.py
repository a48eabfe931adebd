"""A text model within one with vision, as Kimi-K2.5: its family's arrays, under longer names."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spmd_tx.demo.tiny_families import stored_shapes
from spmd_tx.errors import StartError
from spmd_tx.models.base_weights import weights
from spmd_tx.models.checkpoint import huggingface
from spmd_tx.models.config import read_model_config
from spmd_tx.models.declared.encoding import Int4Groups
from spmd_tx.models.families.keys import Refusal
from spmd_tx.models.families.registry import declare
from spmd_tx.sharding.mesh import make_mesh
from tests.golden.families import CONFIGS, write
from tests.support import known_models

# What transformers calls the tensors of a vision tower, and of what leads from it to the text model.
TOWERS = {
    "deepseek_v3": ("vision_tower.encoder.blocks.0.norm0.weight", "mm_projector.proj.0.bias"),
    "ministral3": ("vision_tower.ln_pre.weight", "multi_modal_projector.linear_1.weight"),
}
OUTER = {
    "deepseek_v3": {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"},
    "ministral3": {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"},
}
# Experts only, as config.json of the released models says.
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "weights": {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "symmetric": True,
                "group_size": 32,
            }
        }
    },
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
}


def nested(text, family="deepseek_v3"):
    return {**OUTER[family], "text_config": text, "vision_config": {"hidden_size": 8}}


def write_nested(path, family):
    """Write the family's tiny model as the text model of a model with vision."""
    write(path, family)
    tensors = load_file(path / "model.safetensors")
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    tensors |= dict.fromkeys(TOWERS[family], np.ones(8, np.float32))
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(nested(CONFIGS[family], family)))
    return path


def loaded(path):
    model, mesh = read_model_config(path), make_mesh(1, 1, 1)
    declared = weights(model, mesh, jnp.float32)
    return huggingface.load(path, declared, mesh, lambda _: None, model.unread)


@pytest.mark.parametrize("family", OUTER)
def test_its_arrays_are_those_of_the_family(tmp_path, family):
    plain, inner = loaded(write(tmp_path / "a", family)), loaded(write_nested(tmp_path / "b", family))
    assert jax.tree.structure(plain) == jax.tree.structure(inner)
    jax.tree.map(np.testing.assert_array_equal, plain, inner)


@pytest.mark.parametrize("family", OUTER)
def test_a_tensor_that_is_neither_text_nor_vision_is_refused(tmp_path, family):
    path = write_nested(tmp_path, family)
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "model.norm.weight": np.ones(8, np.float32)}, path / "model.safetensors")
    with pytest.raises(StartError, match=r"for which config.json has no use \('model.norm.weight'"):
        loaded(path)


@pytest.mark.parametrize("outer", [None, False, True])
def test_embeddings_are_tied_as_the_outer_model_says_if_it_does(outer):
    text = CONFIGS["ministral3"] | {"tie_word_embeddings": True}
    said = {} if outer is None else {"tie_word_embeddings": outer}
    assert declare(nested(text, "ministral3") | said).is_tied == (outer in (None, True))


def test_experts_alone_are_encoded_by_the_text_models_own_quantization():
    text = known_models.CONFIGS["moonshotai/Kimi-K2-Thinking"] | {"quantization_config": INT4}
    model = declare(nested(text))
    encoded = {each.map.name for each in model.adapted.values() if each.map.source.encoding is not None}
    assert encoded == {"gate", "up", "down"}
    kinds = {each.map.source.encoding for each in model.adapted.values()}
    assert kinds == {None, Int4Groups(32)}
    for each in model.adapted.values():
        assert (each.map.source.encoding is not None) == bool(each.map.experts), each.map.name
    names = stored_shapes(declare(nested(text | {"num_hidden_layers": 2})))
    assert all(name.startswith("language_model.") for name in names)
    assert "language_model.model.layers.1.mlp.gate.e_score_correction_bias" in names
    assert "language_model.lm_head.weight" in names
    adapted = next(each for each in model.adapted.values() if each.map.name == "kv_a")
    assert adapted.map.adapter_module.startswith("language_model.model.layers.")


def test_a_feature_of_a_text_model_that_is_not_served_is_named():
    with pytest.raises(Refusal, match="sets scoring_func to 'softmax'"):
        declare(nested(CONFIGS["deepseek_v3"] | {"scoring_func": "softmax"}))
