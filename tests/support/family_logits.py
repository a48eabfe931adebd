"""Logits of a model of any family as training computes them, with an adapter or without."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from spmd_tx.models import head
from spmd_tx.models.adapter_formats import peft
from spmd_tx.models.adapters.lora import adapter_weights, rank_in_experts
from spmd_tx.models.adapters.row_lora import row_lora
from spmd_tx.models.backbone import backbone
from spmd_tx.models.base_weights import weights
from spmd_tx.models.checkpoint import huggingface
from spmd_tx.models.config import read_model_config
from spmd_tx.models.forward_pass import Pass
from spmd_tx.protocol.commands import AdapterSpec
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.mesh import DATA, TP
from spmd_tx.sharding.transfer import rows_to_devices
from spmd_tx.sharding.weight import abstract, specs
from spmd_tx.worker.steps.train import both_loras, own_adapters, segment_attend

PADDED = 64


def logits(
    mesh: Mesh,
    path: Path,
    tokens: np.ndarray,
    adapter: AdapterSpec = AdapterSpec(rank=1),
    folder: Path | None = None,
    expert_lora: str = "shared-outer",
    base_dtype: str = "auto",
) -> np.ndarray:
    """Return [T, V] of a model's tokens, which stand in the last row of the batch.

    ``folder`` holds the adapter; None: it adds nothing.
    """
    model = read_model_config(path, expert_lora, base_dtype=base_dtype)
    declared = weights(model, mesh, jnp.float32)
    base = huggingface.load(path, declared, mesh, lambda _: None, model.unread)
    declared_adapters = adapter_weights(model, mesh, 1, adapter.rank, jnp.float32, zero=True)
    places = abstract(mesh, declared_adapters)
    if folder is None:
        adapters = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), places)
    else:
        factors = peft.read(folder, adapter, model, adapter.rank)
        adapters = jax.tree.map(
            lambda x, factor: jax.device_put(factor[..., None, :, :], x.sharding), places, factors
        )
    scales = [adapter.scale, adapter.alpha / rank_in_experts(model, adapter.rank)]

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(specs(declared), specs(declared_adapters), *[jax.P(DATA)] * 3),
        out_specs=jax.P(DATA, None, TP),
    )
    def run(base, adapters, tokens, segments, positions):
        slots = jnp.zeros(tokens.shape[0], jnp.int32)
        loras = both_loras(partial(row_lora, kernels=Kernels()), slots, jnp.array([scales], jnp.float32))
        how = Pass(
            segment_attend(Kernels(), segments), *loras, Kernels(), sequence_parallel=True, segments=segments
        )
        whole = own_adapters(model, adapters)
        h, *_ = backbone(model, base, whole, tokens, positions, how)
        return head.logits(base.unembed, whole.head, how.apply_lora, h)

    rows = mesh.shape["fsdp"] * mesh.shape["ep"]
    batch, length = np.zeros((3, rows, PADDED), np.int32), len(tokens)
    batch[:, -1, :length] = tokens, np.ones(length), np.arange(length)
    return np.asarray(run(base, adapters, *rows_to_devices(mesh, tuple(batch))))[-1, :length]
