"""Measures sampling without a server, in one process: tokens per second, and per CPU second.

    python -m tools.bench.sampling --model DIR [--rounds N] [--rows N] [--batch-invariant] [CASE ...]

The first round of a case compiles, and does not count. CPU seconds depend little on what else is running.
"""

import argparse
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from spmd_tx.coordinator.sampling.bank import BASE_MODEL, VersionBank
from spmd_tx.coordinator.sampling.batch import SampleBatch
from spmd_tx.coordinator.sampling.new_job import SamplingModel
from spmd_tx.coordinator.sampling.shapes import SamplingLimits, SamplingShapes
from spmd_tx.coordinator.wire.sampling import ModelInput, ModelInputChunk, SampleRequest, SamplingParams
from spmd_tx.protocol.commands import AdapterSpec
from spmd_tx.protocol.reports import Reply
from spmd_tx.worker.accelerator import prepare_accelerator
from spmd_tx.worker.engine import Engine
from spmd_tx.worker.programs.compiled import Programs
from tests.support import moves
from tests.support.ready_programs import EverythingReady
from tests.support.tiny_setup import tiny_setup

CONTEXT, BANK_SLOTS, STEPS, PAGE_SIZE, RANK = 2048, 10, 16, 16, 32
DEPTH = 3  # commands on their way, as the dispatcher has them


@dataclass
class Sampler:
    """Samples as fast as this process can."""

    engine: Engine
    rows: int
    speculates: bool = False
    seconds: dict[str, float] = field(default_factory=dict)  # of every request, since the case's start

    def __post_init__(self) -> None:
        model = self.engine.model
        plan, invariant = self.engine.plan, self.engine.setup.batch_invariant
        how = {"on_cpu": plan.on_cpu, "batch_invariant": invariant, "speculates": self.speculates}
        draft_cost = plan.draft_cost if self.speculates else 0.0
        shapes = SamplingShapes(1, CONTEXT, PAGE_SIZE, self.rows, draft_cost=draft_cost, **how)
        self.bank = VersionBank(BANK_SLOTS, Path(tempfile.gettempdir()))
        self.batch = SampleBatch(
            SamplingModel(model, CONTEXT, None, batch_invariant=invariant),
            self.bank,
            SamplingLimits(shapes, plan.pages, STEPS),
            EverythingReady(),
        )
        self.random = np.random.default_rng(0)
        self.in_flight = deque()
        self.start = time.monotonic()

    def version(self, slot: int) -> str:
        """Put a new adapter into the bank."""
        adapter, name = AdapterSpec(rank=RANK), f"version {slot}"
        self.engine.execute(moves.create_adapter(slot, slot, adapter))
        bank = self.bank.reserve(name, adapter).bank
        self.engine.execute(moves.save_sampler(slot, bank, adapter))
        return name

    def ask(self, name: str, length: int, tokens: int, samples: int = 1, version: str = BASE_MODEL) -> int:
        """Ask for samples of a random prompt; returns how many tokens there will be."""
        prompt = self.random.integers(0, self.engine.model.vocab_size, length).tolist()
        params = SamplingParams(max_tokens=tokens, seed=1, stop=[])
        body = SampleRequest(ModelInput([ModelInputChunk(tokens=prompt)]), params, num_samples=samples)
        self.batch.admit(name, body, version)
        return samples * tokens

    def go_on(self, turns: int = 1 << 30) -> None:
        """Run until nothing is left, or so many replies are there."""
        while turns and (self.batch.waiting() or self.in_flight):
            while len(self.in_flight) < DEPTH and (dispatch := self.batch.next_dispatch()) is not None:
                arrays, _ = self.engine.execute(dispatch.command)
                self.in_flight.append((dispatch, arrays))
            dispatch, arrays = self.in_flight.popleft()
            fetched = {name: np.asarray(array) for name, array in arrays.items()}
            reply = Reply(generation=0, process=0, sequence=0, arrays=fetched)
            for name, _ in dispatch.absorb(reply):
                self.seconds[name] = time.monotonic() - self.start
            turns -= 1


def uniform(sampler: Sampler) -> int:
    return sum(sampler.ask(f"{number}", 64, 128, samples=16) for number in range(8))


def ragged(sampler: Sampler) -> int:
    lengths = sampler.random.integers(16, 257, (32, 2)).tolist()
    return sum(sampler.ask(f"{n}", length, tokens, samples=4) for n, (length, tokens) in enumerate(lengths))


def single(sampler: Sampler) -> int:
    return sampler.ask("one", 64, 256)


def sixteen(sampler: Sampler) -> int:
    return sampler.ask("one", 64, 128, samples=16)


def prompts(sampler: Sampler) -> int:
    """Read prompts of 32 to 1,500 tokens; the rate is that of their tokens."""
    lengths = sampler.random.integers(32, 1500, 24).tolist()
    for number, length in enumerate(lengths):
        sampler.ask(f"{number}", length, 1)
    return sum(lengths)


def one_tenant(sampler: Sampler) -> int:
    version = sampler.version(0)
    return sum(sampler.ask(f"{number}", 64, 128, 8, version) for number in range(8))


def eight_tenants(sampler: Sampler) -> int:
    return sum(sampler.ask(f"{number}", 64, 128, 8, sampler.version(number)) for number in range(8))


def beside(sampler: Sampler) -> int:
    """Draw a sample of 4 tokens beside one of 1,500; print what part of the long one's time it takes."""
    tokens = sampler.ask("long", 64, 1500)
    sampler.go_on(turns=6)
    begin = time.monotonic() - sampler.start
    tokens += sampler.ask("short", 64, 4)
    sampler.go_on()
    short, long = (sampler.seconds[name] - begin for name in ("short", "long"))
    print(f"the short sample took {short:.3f} s, the long one {long:.3f} s: {short / long:.3f}")
    return tokens


ALL = (uniform, ragged, single, sixteen, prompts, one_tenant, eight_tenants, beside)
CASES = {case.__name__: case for case in ALL}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE", help=" ".join(CASES))
    parser.add_argument("--model", type=Path, required=True, help="directory of a model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=128, help="of a Decode, at most")
    parser.add_argument("--batch-invariant", action="store_true")
    options = parser.parse_args()
    sizes = {"max_context": CONTEXT, "bank_slots": BANK_SLOTS, "max_rank": RANK, "page_size": PAGE_SIZE}
    setup = tiny_setup(
        model_dir=str(options.model),
        adapter_slots=8,
        decode_rows=options.rows,
        decode_steps=STEPS,
        batch_invariant=options.batch_invariant,
        kernel_choices=str(Path(tempfile.gettempdir()) / "spmd-tx-kernel-choices"),
        **sizes,
    )
    setup = prepare_accelerator(setup, None, print)  # the kernels and flags that a worker here would have
    engine = Engine.start(setup, Programs(lambda what: None), lambda what: None)
    for name in options.cases:
        rates = [measured(engine, options.rows, name) for _ in range(options.rounds + 1)][1:]
        wall, cpu = (median(each) for each in zip(*rates, strict=True))
        print(f"{name}: {wall:,.0f} tokens per second, {cpu:,.0f} per CPU second", flush=True)


def measured(engine: Engine, rows: int, case: str) -> tuple[float, float]:
    """Return the tokens per second, and per CPU second."""
    sampler = Sampler(engine, rows)
    wall, cpu = time.monotonic(), time.process_time()
    tokens = CASES[case](sampler)
    sampler.go_on()
    return tokens / (time.monotonic() - wall), tokens / (time.process_time() - cpu)


if __name__ == "__main__":
    main()
