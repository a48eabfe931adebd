"""Logits equal those of Hugging Face transformers, with and without an adapter that peft has loaded."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.demo import tiny_model
from spmd_tx.models import head
from spmd_tx.models.adapter_formats import peft
from spmd_tx.models.adapters.lora import adapter_weights
from spmd_tx.models.adapters.row_lora import row_lora
from spmd_tx.models.backbone import backbone
from spmd_tx.models.base_weights import weights
from spmd_tx.models.checkpoint import huggingface
from spmd_tx.models.config import read_model_config
from spmd_tx.models.forward_pass import Pass
from spmd_tx.protocol.commands import AdapterSpec
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.mesh import DATA, TP, make_mesh
from spmd_tx.sharding.transfer import rows_to_devices, to_devices
from spmd_tx.sharding.weight import shardings, specs
from spmd_tx.worker.steps.train import both_loras, own_adapters, segment_attend
from tests.golden.cases import CASES, LOGITS, random_adapters

pytestmark = pytest.mark.usefixtures("quickly_compiled")

MAX_RANK, OTHER_SLOT, SLOT = 8, 0, 1
TOLERANCE = 1e-5  # relative to the largest logit


def logits(mesh, case, directory) -> np.ndarray:
    """[T, V] of the case's tokens, which stand in the last row of the batch."""
    path = tiny_model.write(directory / "model", case.spec)
    model = read_model_config(path, case.expert_lora)
    declared = weights(model, mesh, jnp.float32)
    base = huggingface.load(path, declared, mesh, lambda _: None)
    declared_adapters = adapter_weights(model, mesh, 2, MAX_RANK, jnp.float32, zero=True)
    spec = case.adapter or AdapterSpec(rank=1, train_attn=False, train_mlp=False, train_unembed=False)
    peft.write(directory / "adapter", random_adapters(model, spec, case.seed), spec, model, str(path))
    one = peft.read(directory / "adapter", spec, model, MAX_RANK)
    stack = jax.tree.map(lambda leaf: np.stack([np.full_like(leaf, 9.0), leaf], axis=-3), one)
    adapters = jax.tree.map(to_devices, stack, shardings(mesh, declared_adapters))
    scales = spec.scale, spec.expert_scale(model.expert_rank_divisor)
    row_specs = (jax.P(DATA), jax.P(DATA), jax.P(DATA), jax.P(DATA))

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(specs(declared), specs(declared_adapters), *row_specs),
        out_specs=jax.P(DATA, None, TP),
    )
    def run(base, adapters, tokens, segments, positions, slots):
        apply_lora = both_loras(
            partial(row_lora, kernels=Kernels()), slots, jnp.array([(1.0, 1.0), scales], jnp.float32)
        )
        how = Pass(segment_attend(Kernels(), segments), *apply_lora, Kernels(), sequence_parallel=True)
        whole = own_adapters(model, adapters)
        h, *_ = backbone(model, base, whole, tokens, positions, how)
        return head.logits(base.unembed, whole.head, how.apply_lora, h)

    rows = mesh.shape["fsdp"] * mesh.shape["ep"]
    length = 64 if case.length <= 64 else -(-case.length // 512) * 512
    tokens, segments, positions = np.zeros((3, rows, length), np.int32)
    tokens[-1, : case.length], segments[-1, : case.length] = case.tokens, 1
    positions[-1, : case.length] = np.arange(case.length)
    slots = np.array([OTHER_SLOT] * (rows - 1) + [SLOT], np.int32)
    batch = rows_to_devices(mesh, (tokens, segments, positions, slots))
    return np.asarray(run(base, adapters, *batch))[-1]


ON_MESHES = [("adapter", (2, 1, 4)), ("tied_adapter", (2, 2, 2)), ("shared_mixture_adapter", (2, 2, 2))]
# Their models are also those of other cases, with an adapter.
ALIKE = ("grouped", "tied", "mixture", *(name for name, _ in ON_MESHES))


@pytest.mark.parametrize(
    "name, shape",
    [pytest.param(name, (1, 1, 1), marks=[pytest.mark.slow] if name in ALIKE else []) for name in CASES]
    + ON_MESHES,
    ids=str,
)
def test_logits_equal_those_of_transformers(tmp_path, name, shape):
    case, golden = CASES[name], np.load(LOGITS)
    assert np.array_equal(case.tokens, golden[f"{name}/tokens"])
    expected = golden[f"{name}/logits"]
    actual = logits(make_mesh(*shape), case, tmp_path)[golden[f"{name}/rows"]]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
