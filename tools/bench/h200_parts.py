"""What h200.py measures: one function per part, each in a process of its own."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from spmd_tx.models.attention.packed_rows import IMPLEMENTATIONS, candidates
from spmd_tx.models.declared.model import Model
from spmd_tx.models.declared.tower import MERGED, PATCH, PATCH_NUMBERS, Tower
from spmd_tx.models.experts.product import grouped_product
from spmd_tx.models.vision.attention import candidates as image_candidates
from spmd_tx.models.vision.tower_weights import sight
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.sharding.transfer import rows_to_devices
from spmd_tx.worker.self_tests.attention import implementation, with_gradients
from spmd_tx.worker.state import zeros
from spmd_tx.worker.steps.adamw import ADAMW, AdamWInputs
from spmd_tx.worker.steps.adapters import make_adapter_steps
from spmd_tx.worker.steps.images import make_encode_images
from spmd_tx.worker.steps.optimizer import make_optim_step
from spmd_tx.worker.steps.train import make_forward_backward
from tests.support.kernels import kernels_here
from tests.support.model_shapes import QWEN3_4B, QWEN3_8B, TINY
from tools.bench import h200_checks, h200_sampling
from tools.bench.dummy import Dummy, random_arrays
from tools.bench.h200_scale import Scale, model_name
from tools.bench.meter import Meter
from tools.bench.roofline import training_flops

LIBRARIES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
)


QWEN3_5_TOWER = Tower(27, 1152, 4304, 16, 48, QWEN3_8B.d_model)


def ceilings(meter: Meter, scale: Scale) -> None:
    """The machine, and what its arithmetic and its memory can do."""
    for library in LIBRARIES:
        with meter.guard(library):
            if any(found.name == library for found in metadata.distributions()):
                meter.row(library, version=metadata.version(library))
    device = jax.devices()[0]
    memory = device.memory_stats() or {}
    meter.row(device.device_kind, count=jax.device_count(), bytes_limit=memory.get("bytes_limit", 0))
    n, key = scale.pick(8192, 256), jax.random.key(0)
    a, b = (jax.random.normal(k, (n, n), jnp.bfloat16) for k in jax.random.split(key))
    meter.measure("product of two matrices in bfloat16", jax.jit(jnp.matmul), a, b, work=2.0 * n**3)
    big = jnp.ones(scale.pick(1 << 30, 1 << 16), jnp.float32)
    meter.measure("copy, read and written", jax.jit(lambda x: x + 1.0), big, work=2.0 * big.nbytes)
    meter.measure("read only", jax.jit(jnp.sum), big, work=1.0 * big.nbytes)
    meter.measure("an empty program", jax.jit(lambda x: x + 1), jnp.zeros(8))


def attention(meter: Meter, scale: Scale) -> None:
    """Every implementation at the sizes of one layer, forward alone and with gradients."""
    heads, kv_heads, width = scale.pick((32, 8, 128), (4, 2, 16))
    for length, segments in scale.pick(((2048, 1), (2048, 4), (8192, 1), (8192, 16)), ((128, 2),)):
        rows = scale.pick(16384, 256) // length
        place = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
        numbers = place // (length // segments) + 1
        keys = jax.random.split(jax.random.key(1), 4)
        shapes = [(rows, length, n, width) for n in (heads, kv_heads, kv_heads, heads)]
        q, k, v, g = (jax.random.normal(i, s, jnp.bfloat16) for i, s in zip(keys, shapes, strict=True))
        flops = 2.0 * rows * length * (length // segments) * heads * width
        for name in IMPLEMENTATIONS:
            attend, what = (
                implementation(Kernels(rows=name), 0),
                f"{name}, {rows} x {length}, {segments} segment(s)",
            )
            least = scale.ceilings.seconds(flops, 0)
            meter.measure(f"{what}, forward", jax.jit(attend), q, k, v, numbers, floor=least)
            both = with_gradients(attend)
            meter.measure(f"{what}, with gradients", both, numbers, q, k, v, g, floor=3.5 * least)


def train(meter: Meter, scale: Scale) -> None:
    """forward_backward by model, row length, remat level and attention; and optim_step."""
    chosen = scale.attention
    variants = [
        (QWEN3_8B, 2048, [(chosen, "mlp"), (chosen, "none"), (chosen, "full"), ("reference", "mlp")]),
        (QWEN3_8B, 8192, [(chosen, "mlp"), (chosen, "none")]),
        (QWEN3_4B, 2048, [(chosen, "mlp"), (chosen, "none")]),
        (QWEN3_4B, 8192, [(chosen, "mlp")]),
    ]
    made: tuple[Model, Dummy] | None = None
    for model, length, kinds in variants[: scale.pick(None, 1)]:
        if made is None or made[0] is not model:
            made = None  # the old weights first make room
            made = (model, scale.dummy(model))
        _train_model(meter, scale, made[1], scale.pick(length, 128), scale.pick(kinds, kinds[:1]))
    assert made is not None
    dummy = made[1]
    hyper = AdamWInputs(*(np.float32(x) for x in (1e-4, 0.9, 0.95, 1e-8, 0.0, 1.0)))
    state = dummy.train_state()
    moved = 8.0 * sum(x.nbytes for x in jax.tree.leaves(state.w)) / dummy.slots
    optim_step = make_optim_step(dummy.model, dummy.mesh, dummy.declared_train, ADAMW)
    least = scale.ceilings.seconds(0, moved)
    meter.measure("optim_step of one slot", optim_step, state, np.int32(0), hyper, floor=least, carried=(0,))


def _train_model(meter: Meter, scale: Scale, dummy: Dummy, length: int, kinds: list[tuple[str, str]]) -> None:
    model, rank, tokens = dummy.model, dummy.rank, scale.pick(16384, 256)
    rows = tokens // length
    state = dummy.train_state()
    batch = rows_to_devices(dummy.mesh, dummy.batch(rows, length))
    for name, remat in kinds:
        step = make_forward_backward(
            model,
            dummy.mesh,
            dummy.declared_base,
            dummy.declared_train,
            remat,
            kernels=kernels_here(rows=name),
        )
        grad_sum = jax.tree.map(jnp.zeros_like, state.w)
        useful = scale.ceilings.seconds(tokens * training_flops(model, rank, length), 0)
        twice = scale.ceilings.seconds(tokens * training_flops(model, rank, length, twice=True), 0)
        what = f"{model_name(model)}, {rows} x {length}, remat {remat}, attention {name}"
        args = (dummy.base, state.w, grad_sum, state.scale, *batch)
        meter.measure(
            what,
            step,
            *args,
            floor=useful,
            tokens=tokens,
            carried=(2,),
            by_part=True,
            full_remat_ceiling_tokens_per_second=tokens / twice,
        )


def swap(meter: Meter, scale: Scale) -> None:
    """One adapter between its slot, the host and the sampler's bank."""
    dummy = scale.dummy(replace(QWEN3_8B, vocab_size=scale.pick(151936, 512)))
    state, bank = dummy.train_state(), dummy.bank()
    steps = make_adapter_steps(dummy.model, dummy.mesh, dummy.declared_train, dummy.declared_bank)
    two, slot = np.ones(2, np.float32), np.int32(0)
    one = steps.read(state, slot)
    size = float(sum(x.nbytes for x in jax.tree.leaves(one)))
    meter.measure("slot to a copy on the device", steps.read, state, slot, gigabytes=size / 1e9)
    meter.measure("copy to the bank", steps.to_bank, bank, one.w, slot, two, carried=(0,))
    host = jax.device_get(one)
    for what, move in (("device to host", jax.device_get), ("host to device", _to_device(host))):
        seconds = []
        for _ in range(5):
            fresh = jax.block_until_ready(steps.read(state, slot))
            start = time.perf_counter()
            jax.block_until_ready(move(fresh))
            seconds.append(time.perf_counter() - start)
        meter.row(what, milliseconds=1e3 * min(seconds), gigabytes_per_second=size / min(seconds) / 1e9)


def _to_device(host: object) -> Callable[[object], object]:
    return partial(lambda host, _: jax.device_put(host), host)


def copies(meter: Meter, scale: Scale) -> None:
    """Copies and writes in pools of more than 2^32 numbers, page by page."""
    dummy = scale.dummy(QWEN3_8B, slots=1)
    h200_checks.copies(meter, dummy, scale.pick(h200_checks.PAGES, 300))


def kernels(meter: Meter, scale: Scale) -> None:
    """Every kernel beside the reference."""
    platform = jax.devices()[0].platform
    names = ["reference"] if platform == "cpu" else candidates(platform, 128, True)
    number, shards = scale.shard
    checks = [*h200_checks.checks_of(platform, names, scale.is_dry).items()]
    h200_checks.kernels(meter, dict(checks[number::shards]))


def experts(meter: Meter, scale: Scale) -> None:
    """One product with the matrices of a mixture's experts on one of eight devices."""
    local, width, inner, tile = scale.pick((16, 2048, 768, 128), (4, 64, 32, 16))
    kernels = kernels_here()
    for pairs in scale.pick((65536, 8192, 1024), (256,)):
        tiles = pairs // tile
        keys = jax.random.split(jax.random.key(0), 2)
        x = jax.random.normal(keys[0], (pairs, width), jnp.bfloat16)
        w = jax.random.normal(keys[1], (local, width, inner), jnp.bfloat16)
        of_tile = np.sort(np.arange(tiles, dtype=np.int32) % local)
        flops, moved = 2.0 * pairs * width * inner, 2.0 * (x.size + w.size + pairs * inner)
        mesh = make_mesh(1, 1, 1)

        @jax.jit
        @partial(jax.shard_map, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
        def run(x: Array, w: Array, of_tile: Array) -> Array:
            return grouped_product(kernels, x, w, of_tile)

        least = scale.ceilings.seconds(flops, moved)
        meter.measure(
            f"{kernels.products}, {pairs} pairs of {local} experts", run, x, w, of_tile, floor=least
        )


def images(meter: Meter, scale: Scale) -> None:
    """The vision tower of Qwen3.5-9B over one image, by each attention among its patches."""
    small = replace(QWEN3_5_TOWER, depth=2, width=64, inner=96, heads=4, out=TINY.d_model)
    tower = scale.pick(QWEN3_5_TOWER, small)
    model = replace(scale.pick(QWEN3_8B, TINY), tower=tower)
    mesh = make_mesh(1, 1, 1)
    declared = sight(tower, 4096, mesh, scale.dtype)
    w, pool = random_arrays(mesh, declared.tower), zeros(mesh, declared.pool)
    names = image_candidates(jax.devices()[0].platform, True, True)
    for side in scale.pick((32, 64, 128), (8,)):
        patches = side * side
        pixels = np.zeros((1, patches, PATCH_NUMBERS), np.uint8)
        grids, rows = np.full((1, 2), side, np.int32), np.arange(patches // MERGED, dtype=np.int32)[None]
        for name in names:
            step = make_encode_images(model, mesh, *declared, kernels_here(images=name))
            what, args = f"{side * PATCH} x {side * PATCH} pixels, {name}", (w, pool, pixels, grids, rows)
            meter.measure(what, step, *args, carried=(1,))


PARTS: dict[str, Callable[[Meter, Scale], None]] = {
    "copies": copies,
    "kernels": kernels,
    "ceilings": ceilings,
    "train": train,
    "decode": h200_sampling.decode,
    "speculation": h200_sampling.speculation,
    "chunks": h200_sampling.chunks,
    "prefill": h200_sampling.prefill,
    "attention": attention,
    "paged": h200_sampling.paged,
    "experts": experts,
    "images": images,
    "draws": h200_sampling.draws,
    "swap": swap,
}
