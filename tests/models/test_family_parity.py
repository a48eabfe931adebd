"""Logits of every family equal those of Hugging Face transformers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.models import head, huggingface
from spmd_tx.models.backbone import backbone
from spmd_tx.models.base_weights import weights
from spmd_tx.models.config import read_model_config
from spmd_tx.models.forward_pass import Pass
from spmd_tx.models.lora import adapter_weights
from spmd_tx.models.row_lora import row_lora
from spmd_tx.sharding.mesh import DATA, TP, make_mesh
from spmd_tx.sharding.transfer import rows_to_devices
from spmd_tx.sharding.weight import abstract, specs
from spmd_tx.worker.steps.train import both_loras, own_adapters, segment_attend
from tests.golden.families import CONFIGS, LENGTH, LOGITS, ROWS, tokens, write

pytestmark = pytest.mark.usefixtures("quickly_compiled")

TOLERANCE = 1e-5  # relative to the largest logit
PADDED = 64
ALIKE = ("mistral", "qwen3_yarn", "glm4_moe_lite", "qwen3_5")  # other families have all their parts


def logits(mesh, name, directory) -> np.ndarray:
    """[T, V] of the model's tokens, which stand in the last row of the batch."""
    path = write(directory, name)
    model = read_model_config(path)
    declared = weights(model, mesh, jnp.float32)
    base = huggingface.load(path, declared, mesh, lambda _: None, model.declared.ignored)
    declared_adapters = adapter_weights(model, mesh, 1, 1, jnp.float32, zero=True)
    adapters = jax.tree.map(
        lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), abstract(mesh, declared_adapters)
    )

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(specs(declared), specs(declared_adapters), *[jax.P(DATA)] * 3),
        out_specs=jax.P(DATA, None, TP),
    )
    def run(base, adapters, tokens, segments, positions):
        slots = jnp.zeros(tokens.shape[0], jnp.int32)
        loras = both_loras(row_lora, slots, jnp.ones((1, 2)))
        how = Pass(segment_attend("reference", segments), *loras, sequence_parallel=True, segments=segments)
        whole = own_adapters(model, adapters)
        h, *_ = backbone(model, base, whole, tokens, positions, how)
        return head.logits(base.unembed, whole.head, how.apply_lora, h)

    rows = mesh.shape["fsdp"] * mesh.shape["ep"]
    batch = np.zeros((3, rows, PADDED), np.int32)
    batch[:, -1, :LENGTH] = tokens(name), np.ones(LENGTH), np.arange(LENGTH)
    return np.asarray(run(base, adapters, *rows_to_devices(mesh, tuple(batch))))[-1]


@pytest.mark.parametrize(
    "name, shape",
    [pytest.param(name, (1, 1, 1), marks=[pytest.mark.slow] if name in ALIKE else []) for name in CONFIGS]
    + [pytest.param(name, (2, 2, 2), marks=pytest.mark.slow) for name in CONFIGS],
    ids=str,
)
def test_logits_equal_those_of_transformers(tmp_path, name, shape):
    expected = np.load(LOGITS)[f"{name}/logits"]
    actual = logits(make_mesh(*shape), name, tmp_path)[list(ROWS)]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
