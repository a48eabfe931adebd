"""Log-probabilities and gradients of adapters equal those of transformers: every family, in packed rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.models.adapters.lora import Adapters, Lora, rank_in_experts
from spmd_tx.models.base_weights import weights
from spmd_tx.models.checkpoint import huggingface
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.sharding.transfer import rows_to_devices, to_devices
from spmd_tx.sharding.weight import shardings
from spmd_tx.worker.steps.train import make_forward_backward
from spmd_tx.worker.steps.train_state import train_weights
from tests.golden.adapter_cases import ADAPTER, ADAPTERS, CASES, Case, adapter, named, summary, text
from tests.golden.families import write
from tests.support.tiny_engine import LENGTH, ROWS, SLOTS, Datum, deal, mesh_name, pack, to_numpy

OURS, OTHER, MAX_RANK = 2, 0, 8
BEFORE = 20  # tokens of another sequence in our row
GRADIENT = 1e-4  # of the largest number of a factor that the file holds
LOGPROB = 1e-4  # nats
MESHES = [((1, 1, 1), False), ((2, 2, 2), True)]  # and whether base weights are split over fsdp
QUICK = ("gpt_oss", "qwen3_5_moe", "deepseek_v3")  # the other families have no part that these lack


def datum(case: Case, slot: int, loss_weights: np.ndarray, *, is_ours: bool = False) -> Datum:
    tokens = text(case) if is_ours else np.roll(text(case), 3)[: len(loss_weights) + 1]
    unused = np.zeros(len(loss_weights), np.float32)
    return Datum(slot, tokens[:-1], tokens[1:], loss_weights, unused, unused)


def in_slots(case: Case) -> Adapters[np.ndarray]:
    """SLOTS adapters, of which one is the case's, padded to the maximum rank. The others add nothing."""
    model = case.model

    def pair(name: str, factors: Lora[np.ndarray]) -> Lora[np.ndarray]:
        most = model.adapted[name].rank(MAX_RANK)

        def stacked(factor: np.ndarray) -> np.ndarray:
            *many, rank, width = factor.shape
            stack = np.zeros((*many, SLOTS, most, width), np.float32)
            stack[..., OURS, :rank, :] = factor
            return stack

        return Lora(stacked(factors.a), stacked(factors.b))

    pairs = {name: pair(name, factors) for name, factors in named(adapter(case)).items()}
    return Adapters({name: each for name, each in pairs.items() if name != "head"}, pairs["head"])


def trained(case: Case, path, shape, split_base):
    """Return the log-probabilities of our sequence, and the gradient of our slot by the names of factors."""
    model, mesh, data_shards = case.model, make_mesh(*shape), shape[0] * shape[1]
    declared = weights(model, mesh, jnp.float32, split_over_fsdp=split_base)
    base = huggingface.load(path, declared, mesh, lambda _: None, model.unread)
    state = train_weights(model, mesh, SLOTS, MAX_RANK)
    ours = (
        datum(case, OURS, np.zeros(BEFORE, np.float32)),
        datum(case, OURS, case.loss_weights, is_ours=True),
    )
    assert sum(len(each.tokens) for each in ours) <= LENGTH
    rows = deal(data_shards, [[(datum(case, OTHER, np.ones(30, np.float32)),), ours]])
    packed, loss = pack(rows)
    if model.n_experts:
        packed = packed.replace(
            experts=np.full((ROWS, LENGTH, model.n_layers, model.experts_per_token), -1, np.int16)
        )
    w = jax.tree.map(to_devices, in_slots(case), shardings(mesh, state.w))
    grad_sum = jax.tree.map(jnp.zeros_like, w)
    scales = np.tile([ADAPTER.scale, ADAPTER.alpha / rank_in_experts(model, ADAPTER.rank)], (SLOTS, 1))
    step = make_forward_backward(model, mesh, declared, state)
    batch = rows_to_devices(mesh, (packed, loss))
    grad_sum, logprobs, _ = to_numpy(step(base, w, grad_sum, scales.astype(np.float32), *batch))
    place = next(index for index, row in enumerate(rows) if row and row[0].slot == OURS)
    gradients = {
        f"{name}.{factor}": getattr(pair, factor)[..., OURS, :, :]
        for name, pair in named(grad_sum).items()
        for factor in "ab"
    }
    return logprobs[place, BEFORE : BEFORE + len(ours[1].tokens)], gradients


@pytest.mark.parametrize(
    "case, shape, split_base",
    [
        pytest.param(
            case,
            *mesh,
            marks=[] if case.name in QUICK and mesh is MESHES[1] else [pytest.mark.slow],
            id=f"{case.name}-{mesh_name(mesh[0])}",
        )
        for case in CASES
        for mesh in MESHES
    ],
)
def test_gradients_equal_those_of_transformers(tmp_path, case, shape, split_base):
    golden = np.load(ADAPTERS)
    logprobs, gradients = trained(case, write(tmp_path, case.family), shape, split_base)
    expected = golden[f"{case.name}/logprobs"]
    off, furthest = np.abs(logprobs - expected).max(), 0.0
    assert off <= LOGPROB
    for name, gradient in gradients.items():
        rank = case.model.adapted[name.rpartition(".")[0]].rank(ADAPTER.rank)
        assert not np.any(gradient[..., rank:, :]), f"{name}: the padding has a gradient"
        found, wanted = summary(name, gradient[..., :rank, :]), golden[f"{case.name}/{name}"]
        largest = np.abs(wanted[:-1]).max()
        assert largest > 0, name
        np.testing.assert_allclose(found[:-1], wanted[:-1], rtol=0, atol=GRADIENT * largest, err_msg=name)
        np.testing.assert_allclose(found[-1], wanted[-1], rtol=GRADIENT, err_msg=f"the norm of {name}")
        furthest = max(furthest, float(np.abs(found[:-1] - wanted[:-1]).max() / largest))
    print(f"{case.name}: log-probabilities {off:.1e} nats, gradients {furthest:.1e} of the largest")


def test_every_adapted_map_of_every_family_is_compared():
    golden = np.load(ADAPTERS)
    for case in CASES:
        factors = {f"{case.name}/{name}.{each}" for name in named(adapter(case)) for each in "ab"}
        assert factors <= set(golden.files), case.name
