"""Compares kernels of products and sums with NumPy, on the device: of experts, adapters, stacks and memories.

Besides being right, a kernel must give a row the same bits whatever else stands in its tile and wherever the
tile stands, and the same bits twice.

    python -m spmd_tx.worker.self_tests.products '{"implementations": ["mosaic_gpu"], "experts": 16, ...}'

prints a Verdict per implementation, as a line of JSON. A broken kernel may end the process, which process.py
starts.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from spmd_tx.models.adapters.lora import Lora, bank_lora
from spmd_tx.models.adapters.row_sums import row_sums
from spmd_tx.models.checkpoint.packed import Matrix, Packed, decoded, scale_dtype
from spmd_tx.models.declared.encoding import DeviceEncoding, Fp8Blocks, Int4Groups, Int8Groups, Mxfp4
from spmd_tx.models.experts.factor_sums import add_by_group
from spmd_tx.models.experts.kernels import triton_sum
from spmd_tx.models.experts.product import grouped_product
from spmd_tx.models.linear_attention import delta_memory
from spmd_tx.models.stack_product import BLOCK_ROWS, LEAST_ROWS, MOST_ROWS, reads_stack, stacked_maps
from spmd_tx.protocol.kernels import MOSAIC_GPUS, Kernels
from spmd_tx.sharding.mesh import AXES
from spmd_tx.worker.self_tests.verdict import on_device, problem_between, tell_verdicts, worst_error

TILE, TILES = 128, 12  # as training has them
BLOCK = 16  # pairs that are multiplied by one adapter's factors
RANK = 32  # of the adapters with which stacks and sums are tried
SLOTS_OF_ROWS = [3, 0, 0, 3, 1, 3, 0, 4, 3, 1, 0, 3, 3, 3, 1, 4]  # no row has slot 2

Check = Callable[[], str | None]  # why a kernel must not be used; None if it is right

ENCODINGS: dict[str, Callable[[int], DeviceEncoding]] = {
    "Fp8Blocks": lambda group: Fp8Blocks(group, group),
    "Int4Groups": Int4Groups,
    "Int8Groups": Int8Groups,
    "Mxfp4": Mxfp4,
}


class ExpertSizes(msgspec.Struct, frozen=True):
    """Holds the sizes of the experts on one device, or of the feed-forward blocks of some layers."""

    what: ClassVar[str] = "products and sums"  # are tried, in messages
    implementations: list[str]
    experts: int  # or layers
    width: int  # of the model
    inner: int
    dtype: str = "bfloat16"
    device: int = 0  # among those of this process
    encoding: str = ""  # of ENCODINGS, if experts stay encoded
    group: int = 0  # inputs that share a scale
    memory: tuple[int, int] = (0, 0)  # widths of keys and values in linear layers; 0: there are none
    is_mixture: bool = True  # whether there are experts


def checks_of(kernels: Kernels, sizes: ExpertSizes) -> dict[str, Check]:
    """Return the checks of those kernels of an implementation that a model uses, by what they compute."""
    is_gpu, checks = kernels.has_gpu_products, dict[str, Check]()
    if kernels.products == "mosaic_gpu":
        checks["the GPU itself"] = partial(problem_of_gpu, sizes.device)
    checks["sums of rows"] = partial(problem_of_row_sums, kernels, sizes)
    if sizes.is_mixture:
        checks["products of experts"] = partial(problem_of_product, kernels, sizes)
    if sizes.is_mixture and kernels.products != "reference":
        of_factors = msgspec.structs.replace(sizes, width=RANK, encoding="")
        tile = BLOCK if is_gpu else TILE
        checks["products with factors of experts"] = partial(problem_of_product, kernels, of_factors, tile)
    if sizes.is_mixture and is_gpu:
        checks["sums of factors of experts"] = partial(problem_of_sums, kernels, sizes)
        checks["sums of a token's experts"] = partial(problem_of_choices, kernels, sizes)
    if is_gpu:
        checks["products with stacked layers"] = partial(problem_of_stack, kernels, sizes)
        checks["memories of linear layers"] = partial(problem_of_memories, kernels, sizes)
    return checks


def problem_of_gpu(device: int) -> str | None:
    """Say why Mosaic GPU, which would end the process, cannot compile for a device; None if it can."""
    capability = getattr(jax.local_devices()[device], "compute_capability", "0.0")
    is_known = tuple(map(int, capability.split("."))) in MOSAIC_GPUS
    return None if is_known else f"it is for GPUs of other compute capabilities than {capability}"


def problem_of_product(kernels: Kernels, sizes: ExpertSizes, tile: int = TILE) -> str | None:
    """Say why an implementation must not be used; None if it is right and no other row changes a bit."""
    random = np.random.default_rng(0)
    expert_M = random.integers(0, sizes.experts, TILES).astype(np.int32)
    w_XIO = _matrices(random, sizes)
    for transposed, width in ((False, sizes.width), (True, sizes.inner)):
        which = "transposed product" if transposed else "product"
        x_PI = _random(random, sizes.dtype, tile * TILES, width)
        run = on_device(sizes.device, partial(grouped_product, kernels, transposed=transposed))
        got, again = (np.asarray(run(x_PI, w_XIO, expert_M)) for _ in range(2))
        if problem := problem_between(
            f"the {which}", got, _expected(x_PI, w_XIO, expert_M, transposed), again
        ):
            return problem
        tiles, rows = random.permutation(TILES), random.permutation(tile)
        moved = np.asarray(x_PI).reshape(TILES, tile, -1)[tiles][:, rows]
        moved[:, tile // 2 :] = np.asarray(_random(random, sizes.dtype, TILES, tile - tile // 2, width))
        other = run(jnp.asarray(moved.reshape(x_PI.shape)), w_XIO, expert_M[tiles])
        kept = np.asarray(other).reshape(TILES, tile, -1)[:, : tile // 2]
        if kept.tobytes() != got.reshape(TILES, tile, -1)[tiles][:, rows][:, : tile // 2].tobytes():
            return f"the {which} of a row depends on its place, or on other rows"
    return None


def problem_of_stack(kernels: Kernels, sizes: ExpertSizes) -> str | None:
    """Say the same of one layer's map with its adapters, whose matrix and factors are read in place."""
    random, layer = np.random.default_rng(0), sizes.experts - 1
    scale_S = np.array([0.5, 2.0], np.float32)
    for depth, width in ((sizes.width, sizes.inner), (sizes.inner, sizes.width)):
        w_LIO = _random(random, sizes.dtype, sizes.experts, depth, width) * depth**-0.5
        lead = (sizes.experts, 2, RANK)
        lora = Lora(*(_random(random, sizes.dtype, *lead, each) * RANK**-0.5 for each in (depth, width)))
        for rows in (1, LEAST_ROWS, BLOCK_ROWS, MOST_ROWS):
            if not reads_stack(w_LIO.shape, rows):
                continue
            slots_B = random.integers(0, 2, rows).astype(np.int32)
            adapters = jnp.asarray(slots_B), jnp.asarray(scale_S)
            apply = stacked_maps(*adapters, bank_lora(*adapters), interpret=kernels.interpret)
            run, at_layer = on_device(sizes.device, apply), (w_LIO, lora, np.int32(layer))
            x_BI = _random(random, sizes.dtype, rows, depth) * depth**-0.5
            got, again = (np.asarray(run(x_BI, *at_layer)) for _ in range(2))
            what = f"map of {rows} rows with stacked matrices"
            if problem := problem_between(
                f"the {what}", got, _expected_map(x_BI, w_LIO[layer], lora, layer, slots_B, scale_S), again
            ):
                return problem
            for kept in {0, rows - 1}:  # in the first block, and in the last
                beside = _random(random, sizes.dtype, rows, depth).at[kept].set(x_BI[kept])
                if np.asarray(run(beside, *at_layer))[kept].tobytes() != got[kept].tobytes():
                    return f"the {what} depends on other rows"
    return None


def problem_of_sums(kernels: Kernels, sizes: ExpertSizes) -> str | None:
    """Say the same of the gradients of experts' own factors, which are added group by group."""
    random, groups = np.random.default_rng(0), 4
    for block in (1, 16):
        run = on_device(sizes.device, partial(add_by_group, kernels))
        ends = np.cumsum(random.integers(5, 20, groups)).astype(np.int32)
        spans = np.concatenate([[0], ends[:-1]]).astype(np.int32), ends
        low, wide = (
            _random(random, sizes.dtype, ends[-1] + 3, block, width) for width in (RANK, sizes.inner)
        )
        sums = _random(random, "float32", groups, RANK, sizes.inner)
        got, again = (np.asarray(run(sums, low, wide, spans)) for _ in range(2))
        if problem := problem_between(
            "the sum of factors' gradients", got, _expected_sums(sums, low, wide, spans), again
        ):
            return problem
        first, end = spans[0][-1], ends[-1]  # the last group alone, in another place
        nothing = np.zeros(groups - 1, np.int32)
        alone = np.append(nothing, 1).astype(np.int32), np.append(nothing, 1 + end - first).astype(np.int32)
        moved = run(sums, low[first - 1 :], wide[first - 1 :], alone)
        if np.asarray(moved)[-1].tobytes() != got[-1].tobytes():
            return "the sum of factors' gradients depends on other adapters or experts"
    return None


def problem_of_row_sums(kernels: Kernels, sizes: ExpertSizes) -> str | None:
    """Say the same of the gradients of adapters' factors, whose rows are added one after the other."""
    random, slots_B = np.random.default_rng(0), np.array(SLOTS_OF_ROWS, np.int32)
    slots = int(slots_B.max()) + 1
    for width in (sizes.width, sizes.inner):
        rows = np.asarray(_random(random, sizes.dtype, len(slots_B), RANK, width))
        run = on_device(sizes.device, partial(row_sums, kernels, slots=slots), P(AXES))
        got, again = (np.asarray(run(rows, slots_B)) for _ in range(2))
        wanted = np.zeros((slots, RANK, width), np.float32)
        for slot, row in zip(slots_B, rows, strict=True):
            wanted[slot] += row.astype(np.float32)
        if problem := problem_between("the sum of rows' gradients", got, wanted, again):
            return problem
        is_first, moved = slots_B == slots_B[0], np.array(_random(random, sizes.dtype, *rows.shape))
        # Its rows in their order, behind those of others.
        places = np.arange(len(slots_B)) >= np.sum(~is_first)
        moved[places] = rows[is_first]
        elsewhere = np.asarray(run(moved, np.where(places, slots - 1, 0).astype(np.int32)))
        if elsewhere[slots - 1].tobytes() != got[slots_B[0]].tobytes():
            return "the sum of rows' gradients depends on their places, or on other rows"
    return None


def problem_of_choices(kernels: Kernels, sizes: ExpertSizes) -> str | None:
    """Say why the kernel for GPUs that adds the results of a token's experts must not be used."""
    random, tokens, choices = np.random.default_rng(0), 200, 8
    y_WO = np.array(_random(random, sizes.dtype, 2 * tokens, sizes.width + RANK))
    place_TC = random.permutation(tokens * choices).reshape(tokens, choices).astype(np.int32)
    place_TC = np.where(place_TC < len(y_WO), place_TC, -1)
    wanted = np.zeros((tokens, y_WO.shape[1]), np.float32)
    for place_T in place_TC.T:
        wanted += np.where(place_T[:, None] >= 0, y_WO[place_T].astype(np.float32), 0)
    add = on_device(sizes.device, lambda y, place: triton_sum(y, place, len(y_WO), kernels.interpret))
    summed = np.asarray(add(y_WO, place_TC))
    if summed.tobytes() != wanted.astype(summed.dtype).tobytes():
        return f"the sum of a token's experts is off by {worst_error(summed, wanted):.2g}"
    return None


def problem_of_memories(kernels: Kernels, sizes: ExpertSizes) -> str | None:
    """Say the same of the delta rule on memories in their pool."""
    random, layer, heads = np.random.default_rng(0), 1, 2
    if not delta_memory.fits(sizes.memory):
        return None
    pool = _random(random, "float32", layer + 1, 6, heads, *sizes.memory)
    sources_B, targets_B = np.array([2, 0, 5, 4], np.int32), np.array([2, 3, 0, 4], np.int32)
    rows = len(sources_B)
    q, k, v = (_random(random, "float32", rows, heads, sizes.memory[each]) for each in (0, 0, 1))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    decay, strength = jnp.asarray(random.uniform(0.5, 1, (2, rows, heads)), jnp.float32)
    run = on_device(sizes.device, partial(_read_in_pool, kernels))
    rule = q, k, v, decay, strength
    got, again = (jax.tree.map(np.asarray, run(rule, pool, sources_B, targets_B)) for _ in range(2))
    y, after = _expected_memories(tuple(map(np.asarray, rule)), np.asarray(pool)[layer, sources_B])
    wanted = np.array(pool)
    for row, target in enumerate(targets_B):
        if target:
            wanted[layer, target] = after[row]
    for each in zip(got, (y, wanted), again, strict=True):
        if problem := problem_between("the delta rule in a pool", *each):
            return problem
    turned = np.arange(rows)[::-1]
    moved = run(tuple(each[turned] for each in rule), pool, sources_B[turned], targets_B[turned])
    if np.asarray(moved[0])[turned].tobytes() != got[0].tobytes():
        return "the delta rule in a pool depends on a row's place"
    return None


def _read_in_pool(kernels: Kernels, rule: Any, pool: Array, sources_B: Array, targets_B: Array) -> Any:
    """Apply the rule to the second layer; return results and the pool."""
    q, k, v, decay, strength = rule
    memory = delta_memory.InPool(pool, jnp.int32(1), sources_B, targets_B, kernels.interpret)
    return delta_memory.read_token(q, k, v, decay, strength, memory)


def _expected_memories(rule: tuple[np.ndarray, ...], memory: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    q, k, v, decay, strength = rule
    memory = memory * decay[..., None, None]
    new = strength[..., None] * (v - np.einsum("BHEV,BHE->BHV", memory, k))
    memory = memory + k[..., None] * new[:, :, None]
    return np.einsum("BHEV,BHE->BHV", memory, q), memory


def _expected_sums(sums: Array, low: Array, wide: Array, spans: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    parts = np.einsum("NJQ,NJI->NQI", *(np.asarray(each, np.float32) for each in (low, wide)))
    added = [parts[first:end].sum(axis=0) for first, end in zip(*spans, strict=True)]
    return np.asarray(sums) + np.stack(added)


def _expected_map(
    x_BI: Array, w_IO: Array, lora: Lora[Array], layer: int, slots_B: np.ndarray, scale_S: np.ndarray
) -> np.ndarray:
    x, w, a, b = (np.asarray(each, np.float32) for each in (x_BI, w_IO, lora.a[layer], lora.b[layer]))
    low_BR = np.einsum("BI,BRI->BR", x, a[slots_B]) * scale_S[slots_B, None]
    return x @ w + np.einsum("BR,BRO->BO", low_BR, b[slots_B])


def _expected(x_PI: Array, w_XIO: Matrix, expert_M: np.ndarray, transposed: bool) -> np.ndarray:
    tiles = np.asarray(x_PI, np.float32).reshape(len(expert_M), -1, x_PI.shape[1])
    matrices = np.asarray(decoded(w_XIO, jnp.float32), np.float32)
    each = (
        tile @ (matrices[expert].T if transposed else matrices[expert])
        for tile, expert in zip(tiles, expert_M, strict=True)
    )
    return np.concatenate(list(each))


def _matrices(random: np.random.Generator, sizes: ExpertSizes) -> Matrix:
    shape = (sizes.experts, sizes.width, sizes.inner)
    if not sizes.encoding:
        return _random(random, sizes.dtype, *shape)
    return random_packed(random, ENCODINGS[sizes.encoding](sizes.group), *shape)


def random_packed(random: np.random.Generator, encoding: DeviceEncoding, *shape: int) -> Packed:
    """Make matrices [..., I, O] that decode to numbers of about 0.3."""
    *lead, inputs, outputs = shape
    codes = random.integers(0, 256, (*lead, inputs // encoding.of_byte, outputs), dtype=np.uint8)
    scales = random.uniform(0.05, 0.2, (*lead, inputs // encoding.group, outputs))
    if isinstance(encoding, Mxfp4):
        scales = random.integers(122, 126, scales.shape)
    if isinstance(encoding, Fp8Blocks):
        codes, scales = codes & 0x9F, 256 * scales  # small numbers, none of which is NaN
    return Packed(jnp.asarray(codes), jnp.asarray(scales, scale_dtype(encoding)), encoding)


def _random(random: np.random.Generator, dtype: str, *shape: int) -> Array:
    return jnp.asarray(random.standard_normal(shape, np.float32), jnp.dtype(dtype))


def problem_of(name: str, sizes: ExpertSizes) -> str | None:
    """Say the first problem of those kernels of an implementation that a model uses; None: all are right."""
    problems = (check() for check in checks_of(Kernels(products=name), sizes).values())
    return next((problem for problem in problems if problem is not None), None)


if __name__ == "__main__":
    tell_verdicts(sys.argv[1], ExpertSizes, problem_of)
