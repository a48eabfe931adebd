"""With the option, every token of a request goes through the same programs, whatever happens around it.

On the exact fake device a token remembers which program wrote it, and a draw depends on that.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from spmd_tx.coordinator.sampling import shapes
from spmd_tx.coordinator.sampling.bank import BASE_MODEL
from spmd_tx.protocol.commands import Decode, Prefill
from tests.coordinator.sampling.bench import MAX_CONTEXT, PAGE_SIZE, Bench, free_pages, prompt_of

PIECE, CHUNK = 8, 16


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(shapes, "CPU_BLOCK_TOKENS", PIECE)
    monkeypatch.setattr(shapes, "BLOCK_TOKENS", PIECE)
    monkeypatch.setattr(shapes, "BLOCK_ROWS", 2)
    yield
    monkeypatch.undo()


def bench_of(*, batch_invariant=True, **options):
    sizes = {"rows": 4, "prefill_tokens": CHUNK, "on_cpu": True, "pages": 100, "on_demand": True} | options
    bench = Bench(batch_invariant=batch_invariant, exact=True, **sizes)
    for version in ("v1", "v2"):
        bench.register(version)
    return bench


def answer(bench, name):
    """Everything but how much of the prompt was cached."""
    result = bench.results[name]
    result.ClearField("prompt_cache_hit_tokens")
    return result.SerializeToString()


def alone(name, prompt, batch_invariant=True, **options):
    bench = bench_of(batch_invariant=batch_invariant)
    bench.admit(name, prompt, **options)
    bench.run()
    return answer(bench, name)


LONG, SHORT = prompt_of(37), prompt_of(5, 3)


def in_company(batch_invariant):
    bench = bench_of(batch_invariant=batch_invariant)
    bench.admit("ours", LONG, max_tokens=12)
    for number in range(3):
        bench.admit(f"{number}", prompt_of(9, number), max_tokens=15, version="v1", sampler=f"{number}")
    bench.run()
    return answer(bench, "ours")


def behind_a_hit(batch_invariant):
    bench = bench_of(batch_invariant=batch_invariant)
    bench.admit("stem", LONG[:30], max_tokens=4)
    bench.run()
    bench.admit("ours", LONG, max_tokens=12)
    bench.run()
    assert bench.hits("ours") == (24 if batch_invariant else 28)
    return answer(bench, "ours")


def after_preemption(batch_invariant):
    bench = bench_of(batch_invariant=batch_invariant, pages=MAX_CONTEXT // PAGE_SIZE + 2, decode_steps=4)
    bench.admit("first", prompt_of(5), max_tokens=30, num_samples=2, sampler="first")
    bench.admit("ours", LONG, max_tokens=12)
    bench.run()
    read = sum((command.rows.positions == len(LONG) - 2).sum() for command in bench.sent(Prefill))
    assert read > 1  # its prompt was read again
    return answer(bench, "ours")


def after_a_loss(batch_invariant):
    first = bench_of(batch_invariant=batch_invariant, decode_steps=4)
    first.admit("ours", LONG, max_tokens=12)
    while not any(job.samples[0].tokens for job in first.batch.unanswered().values()):
        first.send()
        first.absorb()
    second = bench_of(batch_invariant=batch_invariant, decode_steps=4)
    (job,) = first.batch.unanswered().values()
    assert 0 < len(job.samples[0].tokens) < 12
    second.batch.resume(job)
    second.run()
    return answer(second, "ours")


CASES = [in_company, behind_a_hit, after_preemption, after_a_loss]


@pytest.mark.parametrize("case", CASES)
def test_a_request_goes_through_the_programs_that_it_would_alone(case):
    expected = alone("ours", LONG, max_tokens=12)
    assert case(True) == expected


@pytest.mark.parametrize("case", CASES)
def test_without_the_option_it_does_not(case):
    """So the fake device would notice."""
    expected = alone("ours", LONG, batch_invariant=False, max_tokens=12)
    assert case(False) != expected


def test_known_tokens_are_fed_to_decodes_again_and_only_the_prompt_is_read():
    first = bench_of(decode_steps=4)
    first.admit("ours", SHORT, max_tokens=20)
    for _ in range(4):
        first.send()
        first.absorb()
    (job,) = first.batch.unanswered().values()
    known = list(job.samples[0].tokens)
    assert len(known) >= 8
    second = bench_of(decode_steps=4)
    second.batch.resume(job)
    second.run()
    (prefill,) = second.sent(Prefill)
    assert int((prefill.rows.segments > 0).sum()) == len(SHORT) - 1
    fed = [token for command in second.sent(Decode) for token in command.forced[0].tolist() if token >= 0]
    assert fed == known


def test_scores_of_a_prompt_are_read_by_their_own_program_and_nobody_finds_its_pages():
    options = {"max_tokens": 6, "prompt_logprobs": True, "topk_prompt_logprobs": 2}
    bench = bench_of()
    bench.admit("scored", LONG, **options)
    bench.run()
    bench.admit("plain", LONG, max_tokens=6)
    bench.run()
    assert bench.hits("plain") == 0
    assert answer(bench, "plain") == alone("plain", LONG, max_tokens=6)
    assert answer(bench, "scored") == alone("scored", LONG, **options)


def test_top_tokens_have_a_program_of_their_own():
    bench = bench_of()
    for name, top in (("ours", 0), ("theirs", 3), ("others", 9)):
        bench.admit(name, LONG, max_tokens=12, topk_sample_logprobs=top, sampler=name)
    bench.run()
    for name, top in (("ours", 0), ("theirs", 3), ("others", 9)):
        expected = alone(name, LONG, max_tokens=12, topk_sample_logprobs=top)
        assert answer(bench, name) == expected


@pytest.mark.parametrize("extra", [1, 2, 3, 4])
def test_a_sample_that_must_leave_for_want_of_pages_does_not_stop_the_one_beside_it(extra):
    """Decodes of one kind take turns with those of the other, and the oldest sample is of one kind only."""
    bench = bench_of(on_cpu=False, pages=MAX_CONTEXT // PAGE_SIZE + extra, decode_steps=4)
    bench.admit("oldest", LONG, max_tokens=27)
    bench.admit("younger", prompt_of(9), max_tokens=40, topk_sample_logprobs=3)
    while len(bench.results) < 2:
        assert bench.send(), "nothing is on its way and nothing can be sent"
        bench.absorb()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 9])
@pytest.mark.parametrize("options", [{}, {"prompt_logprobs": True}, {"topk_prompt_logprobs": 2}])
def test_a_prefill_that_only_copies_pages_has_a_program(length, options):
    """The prompt of later samples has been read when the first ones leave."""
    bench = bench_of()
    bench.admit("ours", prompt_of(length), max_tokens=3, num_samples=10, **options)
    bench.run()
    assert len(bench.tokens("ours")) == 10


class Invariance(RuleBasedStateMachine):
    """Requests with common beginnings in little room, cancellations and losses of all workers."""

    def __init__(self):
        super().__init__()
        self.asked = {}
        self.done = {}

    @initialize(shards=st.sampled_from([1, 2]), on_cpu=st.booleans())
    def begin(self, shards, on_cpu):
        self.how = {"shards": shards, "on_cpu": on_cpu, "decode_steps": 4}
        self.bench = bench_of(pages=MAX_CONTEXT // PAGE_SIZE + 4, **self.how)

    @rule(
        stem=st.integers(0, 1),
        length=st.integers(1, 40),
        count=st.integers(1, 20),
        num_samples=st.integers(1, 7),
        version=st.sampled_from([BASE_MODEL, "v1", "v2"]),
        options=st.sampled_from(
            [
                *[{}] * 4,
                {"topk_sample_logprobs": 3},
                {"prompt_logprobs": True},
                {"prompt_logprobs": True, "topk_prompt_logprobs": 2},
                {"prompt_alt_tokens_k": 1},
                {"last": 2},
                {"last": 2, "topk_prompt_logprobs": 5},
            ]
        ),
    )
    def admit(self, stem, length, count, num_samples, version, options):
        name, options = f"request {len(self.asked)}", dict(options)
        last = options.pop("last", None)
        if last is not None and last < length:
            options |= {"prompt_logprobs": True, "prompt_logprobs_last_n": last}
        elif last is not None:
            options = {}
        options |= {"max_tokens": count, "num_samples": num_samples, "stop": [], "version": version}
        self.asked[name] = prompt_of(length, stem), options
        self.bench.admit(name, prompt_of(length, stem), **options, sampler=version)

    @rule()
    def send(self):
        self.bench.send()

    @precondition(lambda self: self.bench.in_flight)
    @rule()
    def absorb(self):
        self.bench.absorb()

    @precondition(lambda self: self.bench.batch.waiting())
    @rule(choice=st.randoms())
    def cancel(self, choice):
        name = choice.choice(sorted(self.bench.batch.unanswered()))
        self.bench.batch.cancel(name)
        del self.asked[name]
        self.asked[f"{name}, cancelled"] = None

    @precondition(lambda self: self.bench.batch.waiting())
    @rule()
    def lose_the_workers(self):
        self.keep_answers()
        jobs = self.bench.batch.unanswered().values()
        self.bench = bench_of(pages=MAX_CONTEXT // PAGE_SIZE + 4, **self.how)
        for job in jobs:
            self.bench.batch.resume(job)

    def keep_answers(self):
        self.done |= {name: answer(self.bench, name) for name in self.bench.results}

    def teardown(self):
        self.bench.run()
        self.keep_answers()
        for name, asked in self.asked.items():
            if asked is not None:
                prompt, options = asked
                lonely = bench_of(shards=self.how["shards"], on_cpu=self.how["on_cpu"])
                lonely.admit(name, prompt, **options, sampler=options["version"])
                lonely.run()
                assert self.done[name] == answer(lonely, name)
        assert free_pages(self.bench) == [MAX_CONTEXT // PAGE_SIZE + 3] * self.how["shards"]


Invariance.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestInvariance = Invariance.TestCase
