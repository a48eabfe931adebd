"""A model all of whose weights were trained leaves as a whole model, which can be read again."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.models.base_weights import weights
from spmd_tx.models.checkpoint import huggingface
from spmd_tx.models.config import read_model_config
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.worker.storage.full_weights import write_model
from tests.golden.families import VOCABULARY, write
from tests.support.tiny_engine import random_arrays, to_numpy

pytestmark = pytest.mark.usefixtures("quickly_compiled")


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_a_written_model_is_read_as_it_was(family, tmp_path: Path):
    """That of Qwen3.5 has tensors that are several maps."""
    path, out = write(tmp_path / "model", family), tmp_path / "out"
    (path / "tokenizer.json").write_text("{}")
    model, mesh = read_model_config(path), make_mesh(1, 1, 1)
    declared = weights(model, mesh, jnp.bfloat16)
    for seed in (1, 2):  # the second replaces the first
        w = random_arrays(declared, seed)
        write_model(out, w, declared, model, path)
    read = huggingface.load(out, declared, mesh, lambda _: None, read_model_config(out).unread)
    assert all(map(np.array_equal, jax.tree.leaves(to_numpy(read)), jax.tree.leaves(w)))
    assert (out / "tokenizer.json").exists()
    assert json.loads((out / "config.json").read_text())["vocab_size"] == VOCABULARY
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []
