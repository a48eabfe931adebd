"""Measures the steps of a mixture on this host: python -m tools.bench.experts [--experts 32] [--choices 2]

Prints what a step takes: a block of training (forward and backward), a prefill, and one token of a decode, in
float32 on one device. With ``--dense`` every expert runs over all rows.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_tx.models.adapters.lora import adapter_weights
from spmd_tx.models.attention.kv_cache import cache_weights
from spmd_tx.models.base_weights import weights
from spmd_tx.models.experts import moe
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.sharding.weight import Weight
from spmd_tx.worker.steps.decode_rows import DecodeRows, RowState
from spmd_tx.worker.steps.losses import TokenLossInputs
from spmd_tx.worker.steps.sample import Bank, make_decode, make_prefill
from spmd_tx.worker.steps.train import Rows, make_forward_backward
from spmd_tx.worker.steps.train_state import train_weights
from tests.support.kernels import kernels_here
from tests.support.model_shapes import resized
from tests.support.tiny_engine import MIXTURE, random_arrays

SLOTS, PAGE, STEPS = 4, 16, 16
TURNS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--choices", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--d-ff", type=int, default=512)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--shape", type=int, nargs=2, action="append", metavar=("ROWS", "TOKENS"))
    parser.add_argument("--decode-rows", type=int, default=16)
    parser.add_argument("--dense", action="store_true")
    arguments = parser.parse_args()
    if arguments.dense:
        moe.LEAST_GROUPED = 1 << 62
    steps = Steps(arguments)
    for rows, length in arguments.shape or [(1, 256), (4, 64)]:
        print(f"train {rows} x {length}: {steps.train(rows, length)}", flush=True)
        print(f"prefill {rows} x {length}: {steps.prefill(rows, length)}", flush=True)
    print(f"decode {arguments.decode_rows}: {steps.decode(arguments.decode_rows)}", flush=True)


@dataclass(frozen=True)
class Took:
    """Holds milliseconds of one call, the least of several: on the clock, and of all cores together."""

    clock: float
    cores: float

    def __str__(self) -> str:
        return f"{self.clock:.1f} ms, {self.cores:.1f} ms of cores"


def measured(run: Callable[[], Any], parts: int = 1) -> Took:
    """Measure a part of a call; the first call compiles and does not count."""
    jax.block_until_ready(run())
    clocks, cores = [], []
    for _ in range(TURNS):
        began = time.perf_counter(), time.process_time()
        jax.block_until_ready(run())
        clocks.append(time.perf_counter() - began[0])
        cores.append(time.process_time() - began[1])
    return Took(1000 * min(clocks) / parts, 1000 * min(cores) / parts)


class Steps:
    """Runs the steps of one model with random weights."""

    def __init__(self, sizes: argparse.Namespace) -> None:
        self.model = resized(
            MIXTURE,
            n_layers=sizes.layers,
            d_model=sizes.d_model,
            d_ff=sizes.d_ff,
            n_experts=sizes.experts,
            experts_per_token=sizes.choices,
        )
        self.mesh = make_mesh(1, 1, 1)
        self.declared = weights(self.model, self.mesh, jnp.float32)
        self.state = train_weights(self.model, self.mesh, SLOTS, sizes.rank)
        factors = adapter_weights(self.model, self.mesh, SLOTS, sizes.rank, jnp.float32, zero=False)
        self.bank = Bank(factors, Weight((SLOTS, 2), jax.P(), jnp.float32))
        self.base, self.w = (
            jax.tree.map(jnp.asarray, random_arrays(declared, 0, 0.05))
            for declared in (self.declared, self.state.w)
        )
        self.cache = cache_weights(self.model, self.mesh, 1024, PAGE, jnp.float32)
        self.chance = np.random.default_rng(0)

    def rows(self, rows: int, length: int) -> Rows:
        tokens = self.chance.integers(0, self.model.vocab_size, (rows, length), dtype=np.int32)
        positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
        slots = np.arange(rows, dtype=np.int32) % SLOTS
        shape = (rows, length, self.model.n_layers, self.model.experts_per_token)
        experts = np.full(shape, -1, np.int16)
        return Rows(tokens, tokens, np.ones_like(tokens), positions, slots, experts)

    def train(self, rows: int, length: int) -> Took:
        step = make_forward_backward(self.model, self.mesh, self.declared, self.state, "full")
        ones, zeros = np.ones((rows, length), np.float32), np.zeros((rows, 1), np.float32)
        loss = TokenLossInputs(
            kinds=np.zeros((rows, 1), np.int32),
            beta=zeros,
            kl_coeff=zeros,
            ratio_mask=None,
            clip_low=ones,
            clip_high=ones,
            weights=ones,
            advantages=ones,
            sampling_logprobs=ones,
        )
        packed, scale = self.rows(rows, length), np.ones((SLOTS, 2), np.float32)
        held = [jax.tree.map(jnp.zeros_like, self.w)]

        def run() -> Any:
            held[0], logprobs, _ = step(self.base, self.w, held[0], scale, packed, loss)
            return logprobs

        return measured(run)

    def with_cache(self) -> tuple[Bank, list[Any]]:
        cache = jax.tree.map(lambda weight: jnp.zeros(weight.shape, weight.dtype), self.cache)
        return Bank(self.w, jnp.ones((SLOTS, 2), jnp.float32)), [cache]

    def prefill(self, rows: int, length: int) -> Took:
        step = make_prefill(
            self.model,
            self.mesh,
            self.declared,
            self.bank,
            self.cache,
            logprobs=False,
            kernels=kernels_here(),
        )
        bank, held = self.with_cache()
        packed = self.rows(rows, length)
        pages = 1 + np.arange(rows * length, dtype=np.int32).reshape(rows, -1) // PAGE

        def run() -> Any:
            held[0], *rest = step(self.base, bank, held[0], packed, pages, None, None)
            return rest

        return measured(run)

    def decode(self, rows: int) -> Took:
        step = make_decode(
            self.model, self.mesh, self.declared, self.bank, self.cache, STEPS, kernels=kernels_here()
        )
        bank, held = self.with_cache()
        integers = np.zeros(rows, np.int32)
        after = RowState(*(jnp.zeros(rows, jnp.int32) for _ in range(3)))
        fresh = DecodeRows(
            source=integers - 1,
            tokens=self.chance.integers(0, self.model.vocab_size, rows, dtype=np.int32),
            positions=integers + 8,
            remaining=integers + 2 * STEPS,
            slots=np.arange(rows, dtype=np.int32) % SLOTS,
            seeds=np.arange(2 * rows, dtype=np.uint32).reshape(rows, 2),
            temperatures=np.ones(rows, np.float32),
            top_k=integers,
            top_p=np.ones(rows, np.float32),
            stop_tokens=np.full((rows, 8), -1, np.int32),
        )
        tables = np.arange(1, 1 + 4 * rows, dtype=np.int32).reshape(rows, 4)

        def run() -> Any:
            nonlocal after
            held[0], after, drawn = step(
                self.base,
                bank,
                held[0],
                RowState(*(jnp.zeros(rows, jnp.int32) for _ in range(3))),
                after,
                tables,
                fresh,
                None,
                jnp.int32(0),
                jnp.int32(STEPS),
            )
            return drawn

        return measured(run, STEPS)


if __name__ == "__main__":
    main()
