"""What h200.py measures of sampling: prefill, decode, speculation, chunks, and attention to pages."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from spmd_tx.models import sampling
from spmd_tx.models.attention.chunk import ChunkTokens
from spmd_tx.models.attention.kv_cache import KvCache
from spmd_tx.models.attention.paged.attention import candidates as paged_candidates
from spmd_tx.models.declared.model import Model
from spmd_tx.protocol.commands import CHUNK_STEPS, DRAFT_TOKENS, PREFILL_TOKENS
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.transfer import rows_to_devices
from spmd_tx.worker.decode_ways import PLAIN, options_of
from spmd_tx.worker.self_tests import paged as paged_self_test
from spmd_tx.worker.self_tests.verdict import worst_error
from spmd_tx.worker.steps.sample import make_decode, make_prefill
from tests.support.kernels import kernels_here
from tests.support.model_shapes import QWEN3_4B, QWEN3_8B
from tools.bench.dummy import PAGE, Dummy
from tools.bench.h200_scale import Scale, model_name
from tools.bench.meter import Meter
from tools.bench.paged import attend_paged
from tools.bench.roofline import decode_bytes, decode_flops, prefill_flops


def decode(meter: Meter, scale: Scale) -> None:
    """Steps of continuous batching's decode, many per dispatch."""
    steps = scale.pick(16, 4)
    variants = [(QWEN3_8B, 64, 1024), (QWEN3_8B, 256, 1024), (QWEN3_8B, 64, 8192), (QWEN3_8B, 1, 1024)]
    variants += [(QWEN3_4B, 64, 1024), (QWEN3_4B, 256, 1024)]
    made: tuple[Model, Dummy] | None = None
    for model, rows, context in scale.pick(variants, [(QWEN3_8B, 4, 128)]):
        if made is None or made[0] is not model:
            made = None
            made = (model, scale.dummy(model))
        dummy = made[1]
        declared = dummy.declared_cache(rows, context)
        step = _decode_step(dummy, declared, steps)
        moved = decode_bytes(dummy.model, dummy.rank, rows, context)
        least = scale.ceilings.seconds(decode_flops(dummy.model, dummy.rank, rows, context), moved)
        kinds = [("graphs", 1), (PLAIN, 1), ("graphs", 4)] if rows > 1 else [("graphs", 1)]
        for way, active in scale.pick(kinds, [(PLAIN, 1)]):
            (state, tables, drawn), (after, *_) = (dummy.decode_rows(rows, context, steps) for _ in range(2))
            args = (dummy.base, dummy.bank(), dummy.cache(declared), state, after, tables, drawn)
            meter.measure(
                f"{model_name(dummy.model)}, {rows} rows, context {context}, {active} adapter(s), {way}",
                step,
                *args,
                np.arange(active, dtype=np.int32),
                np.int32(0),
                np.int32(steps),
                floor=least,
                tokens=rows,
                per=steps,
                carried=(2, 4),
                by_part=way == PLAIN,
                options=options_of(way),
            )


def speculation(meter: Meter, scale: Scale) -> None:
    """A decode's step with as many rows as there are sequences, and with followers that read drafts."""
    dummy, (sequences, context), steps = scale.dummy(QWEN3_8B), scale.pick((128, 1024), (4, 128)), 4
    declared = dummy.declared_cache(sequences, context)
    step = _decode_step(dummy, declared, steps)
    moved = decode_bytes(dummy.model, dummy.rank, sequences, context)
    for read in (1, 2, 4):  # tokens of a sequence that a step reads
        rows = sequences * read
        (state, tables, drawn), (after, *_) = (
            dummy.decode_rows(sequences, context, steps * read, read) for _ in range(2)
        )
        if read > 1:
            drafts = np.zeros((rows, DRAFT_TOKENS), np.int32)
            drawn = drawn.replace(depths=np.arange(rows, dtype=np.int32) % read, drafts=drafts)
        least = scale.ceilings.seconds(decode_flops(dummy.model, dummy.rank, rows, context), moved)
        args = (dummy.base, dummy.bank(), dummy.cache(declared), state, after, tables, drawn)
        meter.measure(
            f"{model_name(dummy.model)}, {sequences} sequences, {read} token(s) of each",
            step,
            *args,
            np.arange(1, dtype=np.int32),
            np.int32(0),
            np.int32(steps),
            floor=least,
            per=steps,
            carried=(2, 4),
            by_part=True,
        )


def chunks(meter: Meter, scale: Scale) -> None:
    """A decode's step alone, and one that reads a part of a chunk of a prompt beside the rows."""
    dummy, (sequences, context) = scale.dummy(QWEN3_8B), scale.pick((128, 1024), (4, 128))
    declared, chunk = dummy.declared_cache(sequences + 1, context), scale.pick(PREFILL_TOKENS, 64)
    step, last = _decode_step(dummy, declared, CHUNK_STEPS), 1 + sequences * context // PAGE
    moved = decode_bytes(dummy.model, dummy.rank, sequences, context)
    for tokens in (0, chunk // 2, chunk):
        (state, tables, drawn), (after, *_) = (
            dummy.decode_rows(sequences, context, CHUNK_STEPS) for _ in range(2)
        )
        if tokens:  # behind the pages of the rows
            places = np.arange(tokens, dtype=np.int32)[None]
            pages = last + np.arange(context // PAGE, dtype=np.int32)[None]
            of_prompt = np.zeros_like(places), places, last + places // PAGE, np.zeros(1, np.int32)
            drawn = drawn.replace(chunk=ChunkTokens(*of_prompt, pages, np.zeros_like(places)))
        read = sequences + tokens // CHUNK_STEPS
        least = scale.ceilings.seconds(decode_flops(dummy.model, dummy.rank, read, context), moved)
        args = (dummy.base, dummy.bank(), dummy.cache(declared), state, after, tables, drawn)
        meter.measure(
            f"{model_name(dummy.model)}, {sequences} rows, chunk of {tokens} tokens",
            step,
            *args,
            np.arange(1, dtype=np.int32),
            np.int32(0),
            np.int32(CHUNK_STEPS),
            floor=least,
            per=CHUNK_STEPS,
            carried=(2, 4),
            by_part=True,
        )


def _decode_step(dummy: Dummy, declared: KvCache, steps: int) -> Any:
    pages = paged_candidates(kernels_here().platform, dummy.model.head_dim, PAGE, True)[0]
    return make_decode(
        dummy.model,
        dummy.mesh,
        dummy.declared_base,
        dummy.declared_bank,
        declared,
        steps,
        kernels=kernels_here(pages=pages),
    )


def paged(meter: Meter, scale: Scale) -> None:
    """One layer's attention of decode: the kernel, the reference, and cuDNN's own page tables."""
    heads, kv_heads, width, layers = scale.pick((32, 8, 128, 2), (4, 2, 16, 2))
    full = (64, 1024, 1), (256, 1024, 1), (256, 1024, 16), (64, 8192, 1)
    for rows, context, samples in scale.pick(full, ((4, 128, 1), (4, 128, 4))):
        pages = rows * context // PAGE
        keys = jax.random.split(jax.random.key(0), 3)
        shape = (layers, pages, PAGE, kv_heads * width)
        pools = tuple(jax.random.normal(key, shape, jnp.bfloat16) for key in keys[:2])
        # What an earlier owner left behind a row's last token may be infinite, and must not be seen.
        order = np.random.default_rng(0).permutation(pages).astype(np.int32).reshape(rows, -1)
        order[:, :-1] = order[np.arange(rows) // samples * samples, :-1]  # their prompt's
        pools = tuple(pool.at[:, order[:, -1], PAGE // 2 :].set(jnp.inf) for pool in pools)
        positions = np.full((rows, 1), context - PAGE // 2 - 1, np.int32)
        q = jax.random.normal(keys[2], (rows, 1, heads, width), jnp.bfloat16)
        args = (q, *pools, order, positions)
        least = scale.ceilings.seconds(0, 2.0 * np.unique(order).size * PAGE * kv_heads * width * 2)
        want = np.asarray(paged_self_test.implementation(Kernels(pages="reference"), 0)(*args), np.float32)
        names = scale.pick(("triton", "reference"), ("reference",))
        ways = {name: paged_self_test.implementation(Kernels(pages=name), 0) for name in names}
        for name, attend in (ways | {"cudnn": jax.jit(_cudnn)}).items():
            what = f"{name}, {rows} rows, {samples} of a prompt, context {context}"
            meter.measure(what, attend, *args, floor=least)
            with meter.guard(what):
                got = np.asarray(attend(*args), np.float32)
                meter.row(f"{what}, error", error=float(worst_error(got, want)))


def _cudnn(q: Array, keys: Array, values: Array, tables: Array, positions: Array) -> Array:
    return attend_paged(q[:, 0], (keys, values), jnp.int32(paged_self_test.LAYER), tables, positions[:, 0])[
        :, None
    ]


def prefill(meter: Meter, scale: Scale) -> None:
    """Prompts into pages, without and with their log-probabilities."""
    dummy = scale.dummy(QWEN3_8B)
    for rows, length in scale.pick(((8, 2048), (2, 8192), (1, 512)), ((2, 128),)):
        declared = dummy.declared_cache(rows, length)
        packed, _ = dummy.batch(rows, length)
        pages = 1 + np.arange(rows)[:, None] * (length // PAGE) + packed.positions // PAGE
        batch = rows_to_devices(dummy.mesh, (packed, pages.astype(np.int32), None, None))
        flops = rows * length * prefill_flops(dummy.model, dummy.rank, length)
        for logprobs in (False, True):
            step = make_prefill(
                dummy.model,
                dummy.mesh,
                dummy.declared_base,
                dummy.declared_bank,
                declared,
                logprobs=logprobs,
                kernels=kernels_here(rows=scale.attention),
            )
            meter.measure(
                f"{model_name(dummy.model)}, {rows} x {length}" + (", with logprobs" if logprobs else ""),
                step,
                dummy.base,
                dummy.bank(),
                dummy.cache(declared),
                *batch,
                floor=scale.ceilings.seconds(flops, 0),
                tokens=rows * length,
                carried=(2,),
                by_part=True,
            )


def draws(meter: Meter, scale: Scale) -> None:
    """Drawing a token per row from logits, without filters and with them."""
    vocabulary = scale.pick(151936, 512)
    for rows in scale.pick((1, 64, 256), (4,)):
        logits = 3.0 * jax.random.normal(jax.random.key(0), (rows, vocabulary))
        number = np.arange(rows, dtype=np.int32)
        seeds = np.stack([number, number], axis=1).astype(np.uint32)
        one = np.ones(rows, np.float32)
        least = scale.ceilings.seconds(0, logits.nbytes)
        for what, top_k, top_p in (("all", -1, 1.0), ("top 50", 50, 1.0), ("top 50 and 0.9", 50, 0.9)):
            args = (logits, seeds, number, one, np.full(rows, top_k, np.int32), np.float32(top_p) * one)
            meter.measure(f"{rows} rows, {what}", jax.jit(sampling.draw), *args, floor=least, tokens=rows)
