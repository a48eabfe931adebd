"""Times sections: the same calls of the SDK for either server."""

import random
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tinker
from tinker import types

from tools.bench.client import Client, log_uniform, policy_datum, timed

Result = dict[str, Any]  # of JSON


@dataclass(frozen=True)
class Load:
    """Sets how much a section asks for at once."""

    vocab_size: int
    rows: int  # of a training step
    row_tokens: int
    longest_row: int  # of ragged ones; the shortest has 16 tokens
    prompts: int
    copies: int  # sequences of each prompt
    answer: int  # tokens; ragged ones have between 16 and twice as many
    group: int  # sequences of each prompt in reinforcement learning, half as long as an answer


LOADS = {
    "tiny": Load(2048, 32, 256, 512, 8, 16, 128, 8),
    "small": Load(8192, 8, 256, 512, 4, 4, 64, 4),
}
SMOKE = Load(0, 4, 64, 64, 2, 2, 16, 2)


@dataclass(frozen=True)
class Limits:
    """Sets when a section has measured enough."""

    repeats: int = 5
    seconds: float = 20.0  # of the timed part, after two repetitions
    fresh_rounds: int = 5
    tenants: int = 4
    tenants_warmup: float = 15.0  # seconds
    tenants_seconds: float = 20.0
    calls: int = 20  # of the shortest requests


class Sections:
    """Runs sections, a method each, and returns the seconds and tokens of every repetition."""

    def __init__(
        self, url: str, model: str, load: Load, limits: Limits, cpu_seconds: Callable[[], float]
    ) -> None:
        self.url, self.model, self.load, self.limits = url, model, load, limits
        self._cpu_seconds = cpu_seconds  # used by the server so far
        self.client = Client(url, model, load.vocab_size)

    def forward_1_token(self) -> Result:
        trainer, one = self.client.trainer, [self.client.datum(1)]
        return self._calls(lambda: self.client.done(trainer.forward(one, "cross_entropy")))

    def sample_1_token(self) -> Result:
        sampler, prompt = self.client.base_sampler(), self.client.text(4)
        return self._calls(lambda: self.client.sample(sampler, [prompt], [1], 1))

    def train_1_token(self) -> Result:
        trainer, one = self.client.trainer, [self.client.datum(1)]
        return self._calls(lambda: self.client.train(trainer, one))

    def healthz(self) -> Result:
        url = f"{self.url}/api/v1/healthz"
        return self._calls(lambda: urllib.request.urlopen(url, timeout=30).read())

    def create_model(self) -> Result:
        return self.repeat(lambda: bool(self.client.new_trainer()), repeats=2)

    def train_uniform(self) -> Result:
        data = [self.client.datum(self.load.row_tokens) for _ in range(self.load.rows)]
        return self.repeat(lambda: self._train(data))

    def train_ragged(self) -> Result:
        draw = random.Random(7)
        lengths = [log_uniform(draw, 16, self.load.longest_row) for _ in range(self.load.rows)]
        data = [self.client.datum(length) for length in lengths]
        return self.repeat(lambda: self._train(data))

    def train_fresh(self) -> Result:
        """Train with new numbers of rows and lengths in every round; nothing is warmed up."""
        draw, rows = random.Random(11), self.load.rows

        def step() -> int:
            sizes = range(draw.randint(rows * 5 // 8, rows * 11 // 8))
            lengths = [log_uniform(draw, 16, self.load.longest_row) for _ in sizes]
            return self._train([self.client.datum(length) for length in lengths])

        return self._fresh(step)

    def sample_uniform(self) -> Result:
        sampler, load = self.client.base_sampler(), self.load
        prompts = [self.client.text(32) for _ in range(load.prompts)]
        return self.repeat(lambda: self._sample(sampler, prompts, [load.answer] * load.prompts), warmup=2)

    def sample_ragged(self) -> Result:
        sampler, draw = self.client.base_sampler(), random.Random(5)
        prompts, limits = self._ragged_prompts(draw, self.load.prompts)
        return self.repeat(lambda: self._sample(sampler, prompts, limits), warmup=2)

    def sample_fresh(self) -> Result:
        """Sample with new numbers of prompts and lengths in every round; nothing is warmed up."""
        sampler, draw, count = self.client.base_sampler(), random.Random(6), self.load.prompts

        def run() -> int:
            prompts, limits = self._ragged_prompts(draw, draw.randint(count * 5 // 8, count * 11 // 8))
            return self._sample(sampler, prompts, limits)

        return self._fresh(run)

    def sample_single(self) -> Result:
        sampler, prompt = self.client.base_sampler(), self.client.text(32)

        def run() -> int:
            return len(self.client.sample(sampler, [prompt], [128], 1)[0][0].tokens)

        return self.repeat(run, warmup=2)

    def rl_iteration(self) -> Result:
        """Publish the weights, sample from them, learn from the samples."""
        trainer, load = self.client.trainer, self.load
        prompts = [self.client.text(32) for _ in range(load.prompts)]
        limits = [load.answer // 2] * load.prompts

        def run() -> int:
            groups = self.client.sample(self.client.sampler_of(trainer), prompts, limits, load.group)
            data = policy_data(prompts, groups)
            self.client.train(trainer, data, "importance_sampling")
            return tokens_of(groups)

        return self.repeat(run, warmup=2, repeats=2 * self.limits.repeats, seconds=2 * self.limits.seconds)

    def tenants(self) -> Result:
        """Run four users, with an adapter each, who sample, learn from it, and sample again."""
        trainers = self.client.trainers(self.limits.tenants)
        loops = [TenantLoop(self.client, self.load, trainer) for trainer in trainers]
        threads = [threading.Thread(target=loop.run, daemon=True) for loop in loops]
        for thread in threads:
            thread.start()
        self._warm_up(loops)
        began, spent = time.perf_counter(), self._cpu_seconds()
        time.sleep(self.limits.tenants_seconds)
        ended, spent = time.perf_counter(), self._cpu_seconds() - spent
        for loop in loops:
            loop.is_over = True
        for thread in threads:
            thread.join(max(1.0, self.client.deadline - time.monotonic()))
        done = [took for loop in loops for at, took in loop.requests if began <= at <= ended]
        errors = [error for loop in loops for error in loop.errors]
        if not done:
            raise RuntimeError(f"no request was answered in {ended - began:.0f} s: {errors[:3]}")
        rate = len(done) / (ended - began)
        return {"seconds": done, "requests_per_s": rate, "cpu_s": spent, "errors": errors[:3]}

    def _warm_up(self, loops: list["TenantLoop"]) -> None:
        """Wait until each has finished a round, but at most half of the time."""
        time.sleep(self.limits.tenants_warmup)
        latest = (time.monotonic() + self.client.deadline) / 2
        while any(len(loop.requests) < 3 and not loop.errors for loop in loops) and time.monotonic() < latest:
            time.sleep(0.2)

    def _train(self, data: list[types.Datum]) -> int:
        self.client.train(self.client.trainer, data)
        return sum(datum.model_input.length for datum in data)

    def _sample(self, sampler: tinker.SamplingClient, prompts: list[list[int]], limits: list[int]) -> int:
        return tokens_of(self.client.sample(sampler, prompts, limits, self.load.copies))

    def _ragged_prompts(self, draw: random.Random, count: int) -> tuple[list[list[int]], list[int]]:
        prompts = [self.client.text(log_uniform(draw, 8, 128)) for _ in range(count)]
        return prompts, [log_uniform(draw, 16, 2 * self.load.answer) for _ in range(count)]

    def _calls(self, call: Callable[[], Any]) -> Result:
        """Time short requests: the first apart, then many, without the first of them."""
        first, _ = timed(call)
        call()
        return {"first_s": first} | self._timed_runs(
            lambda: bool(call()), lambda runs: len(runs) < self.limits.calls
        )

    def repeat(
        self, call: Callable[[], int], warmup: int = 1, repeats: int = 0, seconds: float = 0.0
    ) -> Result:
        """Time a call that returns its tokens, after so many that do not count."""
        repeats, allowed = repeats or self.limits.repeats, seconds or self.limits.seconds
        first, _ = timed(call)
        for _ in range(warmup - 1):
            call()
        more = lambda runs: len(runs) < 2 or (len(runs) < repeats and sum(runs) < allowed)  # noqa: E731
        return {"first_s": first} | self._timed_runs(call, more)

    def _fresh(self, call: Callable[[], int]) -> Result:
        rounds, allowed = self.limits.fresh_rounds, 3 * self.limits.seconds
        return self._timed_runs(call, lambda runs: len(runs) < rounds and sum(runs) < allowed)

    def _timed_runs(self, call: Callable[[], int], wants_more: Callable[[list[float]], bool]) -> Result:
        seconds, tokens = list[float](), list[int]()
        spent = self._cpu_seconds()
        while wants_more(seconds):
            took, count = timed(call)
            seconds.append(took)
            tokens.append(count)
        return {"seconds": seconds, "tokens": tokens, "cpu_s": self._cpu_seconds() - spent}


class TenantLoop:
    """Runs one of several concurrent users."""

    def __init__(self, client: Client, load: Load, trainer: tinker.TrainingClient) -> None:
        self.client, self.load, self.trainer = client, load, trainer
        self.is_over = False
        self.requests: list[tuple[float, float]] = []  # when each was answered, and seconds that it took
        self.errors: list[str] = []

    def run(self) -> None:
        try:
            sampler = self.client.sampler_of(self.trainer)
            while not self.is_over:
                self._iterate(sampler)
        except (tinker.TinkerError, TimeoutError, RuntimeError, ValueError) as error:
            self.errors.append(repr(error)[:300])

    def _iterate(self, sampler: tinker.SamplingClient) -> None:
        prompts = [self.client.text(32)]
        limits = [self.load.answer // 2]
        groups = self._timed(lambda: self.client.sample(sampler, prompts, limits, self.load.group))
        data = policy_data(prompts, groups)
        self._timed(lambda: self.client.done(self.trainer.forward_backward(data, "importance_sampling")))
        step = types.AdamParams(learning_rate=1e-5)
        self._timed(lambda: self.client.done(self.trainer.optim_step(step)))

    def _timed(self, call: Callable[[], Any]) -> Any:
        seconds, value = timed(call)
        self.requests.append((time.perf_counter(), seconds))
        return value


def policy_data(prompts: list[list[int]], groups: list[list[types.SampledSequence]]) -> list[types.Datum]:
    """Make data in which half of each group did well, and the other half did not."""
    return [
        policy_datum(prompt, sequence, 1.0 if place % 2 else -1.0)
        for prompt, group in zip(prompts, groups, strict=True)
        for place, sequence in enumerate(group)
    ]


def tokens_of(groups: list[list[types.SampledSequence]]) -> int:
    return sum(len(sequence.tokens) for group in groups for sequence in group)
