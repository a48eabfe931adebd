"""Measures what speculation gains where drafts are right, and what it costs where they are not.

    python -m tools.bench.speculation --model DIR [--rounds N] [--batch-invariant] [CASE ...]

Rounds with and without speculation take turns, in one process without a server; the first of each compiles,
and does not count. Before a round the answers of an earlier epoch are given, of which a part of the tokens is
replaced by others. CPU seconds depend little on what else is running.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from spmd_tx.coordinator.runtime import metrics
from spmd_tx.coordinator.wire.sampling import ModelInput, ModelInputChunk, SampleRequest, SamplingParams
from spmd_tx.worker.accelerator import prepare_accelerator
from spmd_tx.worker.engine import Engine
from spmd_tx.worker.programs.compiled import Programs
from tests.support.tiny_setup import tiny_setup
from tools.bench.sampling import BANK_SLOTS, CONTEXT, PAGE_SIZE, RANK, STEPS, Sampler

PROMPT_TOKENS = 64
PARTS_RIGHT = 0.6, 0.8, 0.9  # of the tokens of earlier answers


@dataclass(frozen=True)
class Case:
    """Says how many tokens each sample of one prompt has, and how much of earlier answers is right."""

    lengths: tuple[int, ...]
    right: float | None  # None: there are no earlier answers


TAIL = (*(24 + 4 * number for number in range(12)), 256, 320, 384, 448)  # most answers are short
CASES = {
    **{f"single, {right:.0%} right": Case((256,), right) for right in PARTS_RIGHT},
    **{f"tail, {right:.0%} right": Case(TAIL, right) for right in PARTS_RIGHT},
    "single, useless drafts": Case((256,), 0.0),
    "single, no drafts": Case((256,), None),
    "sixteen, no drafts": Case((128,) * 16, None),
    "many, no drafts": Case((128,) * 96, None),
}


@dataclass
class Round:
    """Runs a case once, and keeps what was drawn."""

    engine: Engine
    case: Case
    speculates: bool
    changed: int = 0  # samples with other tokens than the first time

    def run(self, answers: dict[int, list[int]]) -> tuple[float, float]:
        """Return seconds and CPU seconds; fill ``answers``, or compare with them.

        Programs for other numbers of rows round differently, which may decide a token.
        """
        chance = np.random.default_rng(0)
        vocabulary = self.engine.model.vocab_size
        prompt = chance.integers(0, vocabulary, PROMPT_TOKENS).tolist()
        drawn = dict[int, list[int]]()
        sampler = Sampler(self.engine, 128, speculates=self.speculates)
        texts = sampler.batch._guesses._texts.of("session", prompt)
        for number, tokens in answers.items():
            if self.case.right is None:
                break
            is_wrong = chance.random(len(tokens)) >= self.case.right
            others = chance.integers(0, vocabulary, len(tokens))
            texts.put(("earlier", number), np.where(is_wrong, others, tokens).tolist())
        sampler.batch.listener = lambda sample: drawn.update({int(sample.job.request_id): sample.tokens})
        for number, count in enumerate(self.case.lengths):
            params = SamplingParams(max_tokens=count, seed=number, stop=[])
            prompts = ModelInput([ModelInputChunk(tokens=prompt)])
            body = SampleRequest(prompts, params, sampling_session_id="session:sample:0")
            sampler.batch.admit(f"{number}", body, "base")
        begin, cpu = time.monotonic(), time.process_time()
        sampler.go_on()
        spent = time.monotonic() - begin, time.process_time() - cpu
        answers.update(drawn if not answers else {})
        self.changed = sum(drawn[number] != tokens for number, tokens in answers.items())
        return spent


def accepted() -> tuple[float, float]:
    """Return how many tokens were drafted, and how many were right."""
    counters: list[Callable[[], float]] = [
        each.labels(metrics.group())._value.get for each in (metrics.DRAFTED_TOKENS, metrics.ACCEPTED_TOKENS)
    ]
    drafted, right = (read() for read in counters)
    return drafted, right


def measure(name: str, case: Case, plain: Engine, ahead: Engine, rounds: int) -> None:
    """Run a case by plain steps of one engine, and by another one that speculates; print what came of it."""
    answers: dict[int, list[int]] = {}
    spent: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    before, changed = accepted(), 0
    for number in range(rounds + 1):
        for speculates in (False, True) if number % 2 == 0 else (True, False):  # the second is slower
            one = Round(ahead if speculates else plain, case, speculates)
            took = one.run(answers)
            changed = max(changed, one.changed)
            spent[speculates] += [took] if number else []
    drafted, right = (now - then for now, then in zip(accepted(), before, strict=True))
    wall, cpu = ([median(each[n] for each in spent[how]) for how in (False, True)] for n in (0, 1))
    tokens = sum(case.lengths)
    rates = f"{tokens / wall[0]:8.0f} -> {tokens / wall[1]:8.0f} tokens/s, {wall[0] / wall[1]:.2f} x"
    seconds = f"CPU {cpu[0]:.2f} -> {cpu[1]:.2f} s, {cpu[0] / cpu[1]:.2f} x"
    part = right / drafted if drafted else 0
    drafts = f"{part:.0%} of {drafted:.0f} drafts right"
    print(f"{name:24} {rates}; {seconds}; {drafts}; {changed} samples changed", flush=True)


def started(**options: Any) -> Engine:
    """Start an engine as a worker here would, with rows for 128 samples."""
    sizes = {"max_context": CONTEXT, "bank_slots": BANK_SLOTS, "max_rank": RANK, "page_size": PAGE_SIZE}
    setup = tiny_setup(
        kv_cache_tokens=128 * CONTEXT // 4,
        decode_rows=128,
        decode_steps=STEPS,
        kernel_choices=str(Path(tempfile.gettempdir()) / "spmd-tx-kernel-choices"),
        **sizes,
        **options,
    )
    setup = prepare_accelerator(setup, None, print)
    return Engine.start(setup, Programs(lambda what: None), lambda what: None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES).replace("%", "%%"))
    parser.add_argument("--model", type=Path, required=True, help="directory of a model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-invariant", action="store_true")
    options = parser.parse_args()
    engine = started(model_dir=str(options.model), batch_invariant=options.batch_invariant)
    for name in options.cases or CASES:
        measure(name, CASES[name], engine, engine, options.rounds)


if __name__ == "__main__":
    main()
