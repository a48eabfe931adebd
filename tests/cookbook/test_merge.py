"""The cookbook's build_hf_model merges our adapters of every family into the weights that training has."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spmd_tx.demo import tiny_model
from spmd_tx.demo.tiny_families import FAMILIES
from spmd_tx.models.adapter_formats import peft
from spmd_tx.models.adapters.lora import Lora, for_maps, shapes
from spmd_tx.models.config import read_model_config
from spmd_tx.protocol.commands import AdapterSpec
from tests.cookbook.cookbook import PYTHON, run_python

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(600)]

ADAPTER = AdapterSpec(rank=4, alpha=8.0)
WIDTH = 48  # not that of two experts, by which the cookbook sees how matrices are stored
MERGE = """
import sys
from tinker_cookbook.weights import build_hf_model
model, adapter, merged = sys.argv[1:]
build_hf_model(base_model=model, adapter_path=adapter, output_path=merged)
"""


def write_with_vision(path):
    """Nest the text model as the released checkpoints of Qwen3.5 have it."""
    text = json.loads((path / "config.json").read_text())
    kind = text["model_type"].removesuffix("_text")
    architecture = text["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
    whole = {"architectures": [architecture], "model_type": kind, "text_config": text}
    (path / "config.json").write_text(json.dumps(whole | {"tie_word_embeddings": False}))
    tensors = load_file(path / "model.safetensors")
    nested = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(nested, path / "model.safetensors", metadata={"format": "pt"})


def merged_by_us(model, adapters, tensors):
    """Add what the adapter means to the tensors of the checkpoint, by the declaration."""
    for name, found in model.adapted.items():
        factors = adapters.layers.get(name, adapters.head)
        for layer, number in enumerate(found.numbers or [None]):
            for expert in range(found.map.experts or 1):
                a, b = (factor if number is None else factor[layer] for factor in (factors.a, factors.b))
                a, b = (factor[expert] if factor.ndim == 3 else factor for factor in (a, b))
                source = found.map.source
                stored = tensors[source.name.format(layer=number, expert=expert)]
                stored = stored[expert] if source.stacked else stored
                stored = stored if source.transposed else stored.T
                stored[slice(*source.rows or (None,))] += ADAPTER.scale * b.T @ a
    return tensors


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_weights_are_those_that_training_has(tmp_path, environment, family):
    spec = tiny_model.Spec(family=family, d_model=WIDTH, tied=False)
    path = tiny_model.write(tmp_path / "model", spec)
    if family.startswith("qwen3_5"):
        write_with_vision(path)
    model, random = read_model_config(path), np.random.default_rng(0)

    def pair(name):
        its = shapes(model, name, ADAPTER.rank)
        return Lora(*(0.3 * random.standard_normal(shape).astype(np.float32) for shape in (its.a, its.b)))

    adapters = for_maps(model, pair)
    peft.write(tmp_path / "adapter", adapters, ADAPTER, model, str(path))
    folders = [str(path), str(tmp_path / "adapter"), str(tmp_path / "merged")]
    run_python(environment, [PYTHON, "-c", MERGE, *folders])

    expected = merged_by_us(model, adapters, load_file(path / "model.safetensors"))
    files = (tmp_path / "merged").glob("*.safetensors")
    merged = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert merged.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(merged[name], tensor, rtol=0, atol=0, err_msg=name)
