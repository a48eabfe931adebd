"""Logits of a model of any family as training computes them, with an adapter or without."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from spmd_tx.models import head, mtp
from spmd_tx.models.adapter_formats import peft
from spmd_tx.models.adapters.lora import Adapters, adapter_weights, rank_in_experts
from spmd_tx.models.adapters.row_lora import row_lora
from spmd_tx.models.backbone import backbone
from spmd_tx.models.base_weights import Weights, weights
from spmd_tx.models.checkpoint import huggingface
from spmd_tx.models.config import read_model_config
from spmd_tx.models.declared.model import Model
from spmd_tx.models.forward_pass import Pass
from spmd_tx.protocol.commands import AdapterSpec
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.mesh import DATA, TP
from spmd_tx.sharding.transfer import rows_to_devices, to_devices
from spmd_tx.sharding.weight import Weight, abstract, specs
from spmd_tx.worker.steps.train import both_loras, own_adapters, segment_attend

PADDED = 64
POOL = jax.P(None, TP)  # of images
QUICKLY = "jax_disable_most_optimizations"  # such programs are others (engine_setup.py)


@dataclass(frozen=True)
class Images:
    """The tokens of a prompt's images, to which ids from the vocabulary's size on lead, and its places."""

    pool: np.ndarray  # float32 [P, S, D]
    places: np.ndarray  # int32 [T, 3]


def logits(
    mesh: Mesh,
    path: Path,
    tokens: np.ndarray,
    adapter: AdapterSpec = AdapterSpec(rank=1),
    folder: Path | None = None,
    expert_lora: str = "shared-outer",
    base_dtype: str = "auto",
    images: Images | None = None,
    speculation: str = "off",
) -> np.ndarray:
    """Return [T, V] of a model's tokens, which stand in the last row of the batch.

    ``folder`` holds the adapter; None: it adds nothing. With ``speculation`` "mtp" they are those of drafts.
    """
    model = read_model_config(path, expert_lora, base_dtype=base_dtype, speculation=speculation)
    pool, quickly = None if images is None else images.pool.shape, jax.config.read(QUICKLY)
    run, declared, declared_adapters = _program(mesh, model, adapter.rank, pool, quickly)
    base = huggingface.load(path, declared.replace(images=None), mesh, lambda _: None, model.unread)
    if images is not None:
        base = base.replace(images=to_devices(images.pool, NamedSharding(mesh, POOL)))
    places = abstract(mesh, declared_adapters)
    if folder is None:
        adapters = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), places)
    else:
        factors = peft.read(folder, adapter, model, adapter.rank)
        adapters = jax.tree.map(
            lambda x, factor: jax.device_put(factor[..., None, :, :], x.sharding), places, factors
        )
    scales = np.array([[adapter.scale, adapter.alpha / rank_in_experts(model, adapter.rank)]], np.float32)
    rows, length = mesh.shape["fsdp"] * mesh.shape["ep"], len(tokens)
    padded = PADDED * -(-length // PADDED)
    batch = np.zeros((3, rows, padded), np.int32)
    batch[:, -1, :length] = tokens, np.ones(length), np.arange(length)
    places = None
    if images is not None:
        places = np.zeros((rows, padded, 3), np.int32)
        places[-1, :length] = images.places
    return np.asarray(run(base, adapters, scales, *rows_to_devices(mesh, (*batch, places))))[-1, :length]


@functools.cache
def _program(
    mesh: Mesh, model: Model, rank: int, pool: tuple[int, ...] | None, _: bool
) -> tuple[Callable[..., Any], Weights[Weight], Adapters[Weight]]:
    """Return what computes logits, and what it declares of weights and adapters; one for equal models."""
    declared = weights(model, mesh, jnp.float32)
    if pool is not None:
        declared = declared.replace(images=Weight(pool, POOL, jnp.float32))
    declared_adapters = adapter_weights(model, mesh, 1, rank, jnp.float32, zero=True)

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(specs(declared), specs(declared_adapters), jax.P(), *[jax.P(DATA)] * 4),
        out_specs=jax.P(DATA, None, TP),
    )
    def run(
        base: Any, adapters: Any, scales: Any, tokens: Any, segments: Any, positions: Any, places: Any
    ) -> Any:
        slots = jnp.zeros(tokens.shape[0], jnp.int32)
        loras = both_loras(partial(row_lora, kernels=Kernels()), slots, scales)
        attend, more = segment_attend(Kernels(), segments), {"segments": segments, "places": places}
        how = Pass(attend, *loras, Kernels(), sequence_parallel=True, **more)
        whole = own_adapters(model, adapters)
        h, *_ = backbone(model, base, whole, tokens, positions, how)
        if model.mtp is not None:
            h, _ = mtp.read(model, base, whole, h, jnp.roll(tokens, -1, axis=1), positions, how, None)
        return head.logits(base.unembed, whole.head, how.apply_lora, h)

    return run, declared, declared_adapters
