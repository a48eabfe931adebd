import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tinker.proto.response_conv import deserialize_sample_response

from spmd_tx.coordinator.sampling.bank import BASE_MODEL
from spmd_tx.coordinator.sampling.new_job import OF_THE_PROMPT, draw_seeds
from spmd_tx.coordinator.wire import tinker_pb2
from spmd_tx.coordinator.wire.fields import TensorData
from spmd_tx.errors import MeshError, NotLoaded
from spmd_tx.protocol.commands import Decode, Prefill
from tests.coordinator.sampling.bench import MAX_CONTEXT, PAGE_SIZE, Bench, expected, free_pages, prompt_of
from tests.coordinator.sampling.fake_device import BASE, VOCABULARY, draw, score


def int64(rows):
    return TensorData([float(each) for row in rows for each in row], "int64", [len(rows), len(rows[0])])


@pytest.mark.parametrize("length", [1, 2, PAGE_SIZE, PAGE_SIZE + 1, PAGE_SIZE + 2, 40])
@pytest.mark.parametrize("count", [1, 3, 4, 9, 24])
def test_a_sample_follows_from_its_prompt_and_its_seed(length, count):
    bench = Bench()
    bench.admit("a", prompt_of(length), max_tokens=count, seed=5)
    bench.run()
    tokens, logprobs = expected("a", prompt_of(length), count, seed=5)
    assert bench.tokens("a") == [tokens]
    assert bench.logprobs("a")[0] == pytest.approx(logprobs)
    assert bench.results["a"].sequences[0].stop_reason == tinker_pb2.STOP_REASON_LENGTH


@pytest.mark.parametrize("shards, num_samples", [(1, 3), (1, 11), (2, 8), (2, 9), (4, 2)])
def test_samples_of_one_prompt_share_its_pages_but_not_their_own(shards, num_samples):
    prompt = prompt_of(2 * PAGE_SIZE + 3)
    bench = Bench(shards=shards)
    bench.admit("a", prompt, max_tokens=10, num_samples=num_samples)
    bench.run()
    assert bench.tokens("a") == [expected("a", prompt, 10, index=index)[0] for index in range(num_samples)]
    written = sum(int((command.rows.segments > 0).sum()) for command in bench.sent(Prefill))
    assert written == len(prompt[1:]) * min(shards, -(-num_samples // 4)), (
        "a prompt is written once per shard"
    )


def test_samples_of_one_request_differ_with_and_without_a_seed():
    assert len({draw_seeds(seed, "a", index) for seed in (None, 1, 2**40, -1) for index in range(4)}) == 16


def test_the_same_seed_gives_the_same_tokens_whatever_else_is_in_the_batch():
    alone = Bench()
    alone.admit("a", prompt_of(9), max_tokens=20, seed=3)
    alone.run()
    crowded = Bench(rows=3, shards=2)
    for number in range(9):
        crowded.admit(f"b{number}", prompt_of(3 + number, number), max_tokens=5 + number, num_samples=2)
    crowded.admit("other id", prompt_of(9), max_tokens=20, seed=3)
    crowded.run(depth=1)
    assert crowded.tokens("other id") == alone.tokens("a")


def test_max_tokens_may_be_left_to_the_context():
    bench = Bench()
    bench.admit("a", prompt_of(50))
    bench.run()
    assert len(bench.tokens("a")[0]) == MAX_CONTEXT - 50


def test_a_stop_token_ends_the_sample_and_belongs_to_it():
    whole, _ = expected("a", prompt_of(5), 30)
    bench = Bench()
    bench.admit("a", prompt_of(5), max_tokens=30, stop=[whole[10]])
    bench.run()
    assert bench.tokens("a") == [whole[: whole.index(whole[10]) + 1]]
    assert bench.results["a"].sequences[0].stop_reason == tinker_pb2.STOP_REASON_STOP


def test_more_stop_tokens_than_the_device_checks_are_checked_here():
    whole, _ = expected("a", prompt_of(5), 30)
    others = [token for token in range(VOCABULARY) if token not in whole][:20]
    bench = Bench()
    bench.admit("a", prompt_of(5), max_tokens=30, stop=[*others, whole[4]])
    bench.run()
    assert bench.tokens("a") == [whole[: whole.index(whole[4]) + 1]]


def test_a_stop_string_ends_the_sample_with_the_token_that_completes_it():
    whole, _ = expected("a", prompt_of(5), 30)
    bench = Bench()
    bench.admit("a", prompt_of(5), max_tokens=30, stop=f"{whole[6]}><{whole[7]}")
    bench.run()
    assert bench.tokens("a") == [whole[:8]]


@pytest.mark.parametrize("length, last_n, nans", [(9, None, 1), (9, 3, 6), (1, None, 1)])
def test_prompt_logprobs_are_those_of_the_prompt_from_its_second_token_on(length, last_n, nans):
    prompt = prompt_of(length)
    bench = Bench()
    bench.admit("b", prompt_of(7, 1), max_tokens=2)
    bench.admit("a", prompt, max_tokens=1, prompt_logprobs=True, prompt_logprobs_last_n=last_n, num_samples=6)
    bench.run()
    scores = np.frombuffer(bench.results["a"].prompt_logprobs, np.float32)
    assert np.isnan(scores).sum() == nans
    for position in np.flatnonzero(~np.isnan(scores)):
        assert scores[position] == score(BASE, prompt[:position], prompt[position])
    assert bench.results["b"].prompt_logprobs == b""


def test_each_prompt_of_a_prefill_gets_what_was_wanted_of_it():
    prompt, other = prompt_of(9), prompt_of(7, 1)
    bench = Bench()
    bench.admit("plain", prompt_of(12), max_tokens=2)
    bench.admit("a", prompt, max_tokens=2, topk_prompt_logprobs=2, prompt_alt_tokens_k=1, seed=3)
    bench.admit("b", other, max_tokens=2, prompt_alt_tokens_k=6, num_samples=6, seed=4)
    ids = [[token] for token in prompt[1:]]
    bench.admit("c", prompt, max_tokens=2, target_prompt_logprobs=int64(ids), prompt_logprobs=True)
    bench.run()
    assert len(bench.sent(Prefill)) < 4, "they were to share a Prefill"
    a, b, c = (deserialize_sample_response(bench.bodies[name]) for name in "abc")
    assert [row and [token for token, _ in row] for row in a.topk_prompt_logprobs] == [None] + [[0, 1]] * 8
    for response, asked, seed, count in ((a, prompt, 3, 1), (b, other, 4, 6)):
        seeds = draw_seeds(seed, "", OF_THE_PROMPT)
        expected_draws = [
            [draw(BASE, asked[:place], [*seeds, number])[0] for number in range(count)]
            for place in range(1, len(asked))
        ]
        assert response.prompt_alt_tokens.tokens.tolist() == expected_draws
    assert c.target_prompt_logprobs.tolist() == [[-1.0 - token] for token in prompt[1:]]
    assert c.prompt_logprobs[1:] == [score(BASE, prompt[:n], prompt[n]) for n in range(1, 9)]
    assert deserialize_sample_response(bench.bodies["plain"]).topk_prompt_logprobs is None


def test_nobody_who_wants_nothing_more_gets_another_program():
    bench = Bench()
    bench.admit("a", prompt_of(9), max_tokens=9, prompt_logprobs=True)
    bench.run()
    bench.admit("b", prompt_of(9, 1), max_tokens=9, topk_sample_logprobs=3)
    bench.run()
    assert [command.wishes for command in bench.sent(Prefill)] == [None, None]
    assert {command.top for command in bench.sent(Decode)} == {0, 4}


def test_what_is_known_of_tokens_is_kept_when_another_batch_goes_on():
    wishes = {"topk_sample_logprobs": 3, "prompt_alt_tokens_k": 2, "prompt_logprobs": True}
    first = Bench(decode_steps=4)
    first.admit("a", prompt_of(5), max_tokens=30, num_samples=2, **wishes)
    for _ in range(4):
        first.send()
        first.absorb()
    whole = Bench()
    whole.admit("a", prompt_of(5), max_tokens=30, num_samples=2, **wishes)
    whole.run()
    second = Bench(decode_steps=4)
    second.batch.resume(first.batch.unanswered()["a"])
    second.run()
    assert second.bodies["a"] == whole.bodies["a"]
    assert all(command.wishes is None for command in second.sent(Prefill))
    for sequence in deserialize_sample_response(second.bodies["a"]).sequences:
        drawn = [[token + n for n in range(3)] for token in sequence.tokens]
        assert [[token for token, _ in row] for row in sequence.topk_logprobs] == drawn


def test_rows_of_different_versions_run_side_by_side():
    bench = Bench()
    for version in ("v1", "v2"):
        bench.register(version)
    for version in ("v1", "v2", BASE_MODEL):
        bench.admit(version, prompt_of(6), version, max_tokens=8, seed=1)
    bench.run()
    for version in ("v1", "v2", BASE_MODEL):
        assert bench.tokens(version) == [expected("", prompt_of(6), 8, seed=1, version=version)[0]]
    assert len(bench.sent("load_sampler")) == 2


@pytest.mark.parametrize("fault", ["user", "server"])
def test_samples_of_a_version_that_workers_do_not_load_fail_and_no_others(fault):
    bench = Bench()
    bench.refused, bench.refuses_damage = {"foreign"}, fault == "server"
    for version in ("v1", "foreign"):
        bench.register(version)
        for each in range(3):
            bench.admit(f"{version} {each}", prompt_of(6), version, max_tokens=8, seed=1)
    bench.run()
    assert bench.failures.keys() == {f"foreign {each}" for each in range(3)}
    assert {each.category for each in bench.failures.values()} == {fault}
    with pytest.raises(NotLoaded, match="not loaded: foreign is of another base model") as later:
        bench.admit("later", prompt_of(6), "foreign", max_tokens=8)
    assert later.value.fault == fault
    bench.admit("v1 again", prompt_of(7), "v1", max_tokens=8, seed=2)
    bench.run()
    for each in range(3):
        assert bench.tokens(f"v1 {each}") == [expected("", prompt_of(6), 8, seed=1, version="v1")[0]]
    assert bench.tokens("v1 again") == [expected("", prompt_of(7), 8, seed=2, version="v1")[0]]
    assert bench.bank.pool.slot_of("foreign") is None


def test_more_versions_than_slots_take_turns():
    bench = Bench(slots=4)
    for number in range(7):
        bench.register(f"v{number}")
        for each in range(3):
            bench.admit(f"{number} {each}", prompt_of(6), f"v{number}", max_tokens=30, seed=each)
    bench.run()
    for number in range(7):
        for each in range(3):
            wanted, _ = expected("", prompt_of(6), 30, seed=each, version=f"v{number}")
            assert bench.tokens(f"{number} {each}") == [wanted]


def test_a_short_sample_beside_a_long_one_is_answered_when_it_is_done():
    bench = Bench(decode_steps=8)
    bench.admit("long", prompt_of(3), max_tokens=60)
    bench.send()
    bench.send()
    bench.admit("short", prompt_of(3), max_tokens=4)
    while "short" not in bench.results:
        while bench.send():
            pass
        bench.absorb()
    assert sum(command.steps for command in bench.sent(Decode)) <= 4 * 8


def test_the_first_decodes_after_a_time_of_rest_have_few_steps():
    """Requests that are sent together come one after the other: the later ones should not wait for long."""
    bench = Bench(decode_steps=16)
    for name in ("a", "b"):
        bench.admit(name, prompt_of(3), max_tokens=40)
        bench.run(depth=10)
    assert [command.steps for command in bench.sent(Decode)] == 2 * [4, 4, 16, 16]


def test_two_decodes_are_on_their_way_and_no_more():
    bench = Bench()
    bench.admit("a", prompt_of(3), max_tokens=40)
    while bench.send():
        pass
    assert [type(dispatch.command) for dispatch, _ in bench.in_flight] == [Prefill, Decode, Decode]


def test_a_decode_whose_outcome_nobody_waits_for_is_not_sent():
    bench = Bench(decode_steps=8)
    bench.admit("a", prompt_of(3), max_tokens=12)
    bench.run(depth=10)
    assert sum(command.steps for command in bench.sent(Decode)) <= 16


def test_pages_are_free_as_soon_as_the_last_decode_is_sent():
    bench = Bench(decode_steps=8)
    before = free_pages(bench)
    bench.admit("a", prompt_of(3), max_tokens=8)
    while bench.send():
        pass
    assert free_pages(bench) == before


def test_rows_shrink_to_those_that_are_alive():
    bench = Bench(rows=16)
    bench.admit("long", prompt_of(3), max_tokens=60)
    bench.admit("short", prompt_of(3), max_tokens=8, num_samples=12)
    bench.run()
    assert [len(command.source) for command in bench.sent(Decode)][:: len(bench.sent(Decode)) - 1] == [16, 1]


def test_prompts_are_packed_into_few_rows():
    bench = Bench(rows=16, pages=100)
    for number in range(12):
        bench.admit(f"{number}", prompt_of(10, number), max_tokens=4)
    bench.run()
    [prefill] = bench.sent(Prefill)
    assert prefill.rows.tokens.shape == (4, 64)
    assert all(
        bench.tokens(f"{each}") == [expected(f"{each}", prompt_of(10, each), 4)[0]] for each in range(12)
    )


@pytest.mark.parametrize("shards", [1, 2])
def test_when_pages_run_out_samples_make_room_and_end_the_same(shards):
    bench = Bench(rows=16, pages=MAX_CONTEXT // PAGE_SIZE + 1, shards=shards)
    for number in range(6):
        bench.admit(f"{number}", prompt_of(10, number), max_tokens=40, num_samples=3)
    bench.run()
    for number in range(6):
        wanted = [expected(f"{number}", prompt_of(10, number), 40, index=index)[0] for index in range(3)]
        assert bench.tokens(f"{number}") == wanted
    assert bench.device.executed[Prefill] > 3
    assert free_pages(bench) == [MAX_CONTEXT // PAGE_SIZE] * shards


def test_a_cancelled_request_leaves_nothing_behind():
    bench = Bench(rows=4)
    before = free_pages(bench)
    bench.admit("a", prompt_of(9), max_tokens=50, num_samples=9)
    bench.admit("b", prompt_of(9), max_tokens=5, seed=1)
    for _ in range(3):
        bench.send()
    bench.batch.cancel("a")
    bench.batch.cancel("a")
    bench.run()
    assert bench.results.keys() == {"b"}
    assert bench.tokens("b") == [expected("", prompt_of(9), 5, seed=1)[0]]
    assert free_pages(bench) == before


def test_what_a_cancelled_request_held_is_given_to_others_by_the_very_next_command():
    bench = Bench(rows=4, pages=1 + MAX_CONTEXT // PAGE_SIZE)
    before = free_pages(bench)
    bench.admit("a", prompt_of(30), max_tokens=50, num_samples=4)
    for _ in range(3):
        assert bench.send()
    bench.admit("b", prompt_of(30), max_tokens=5, num_samples=4)
    assert bench.batch.next_dispatch() is None  # there is neither a row nor a page for it
    bench.batch.cancel("a")
    assert free_pages(bench) == before
    assert bench.send()
    assert bench.in_flight[-1][0].requests == {"b"}
    bench.run()
    assert bench.tokens("b") == [expected("b", prompt_of(30), 5, index=index)[0] for index in range(4)]


def test_a_worker_that_loses_tokens_is_found_out():
    bench = Bench()
    bench.admit("a", prompt_of(1), max_tokens=8)
    bench.send()
    dispatch, reply = bench.in_flight[0]
    reply.arrays["tokens"][3:] = -1
    with pytest.raises(MeshError, match="3 of 4 tokens for a"):
        dispatch.absorb(reply)


def test_a_listener_hears_of_tokens_as_they_come_also_when_another_batch_goes_on():
    heard = []

    def listen(sample):
        heard.append((sample.job.request_id, sample.index, list(sample.tokens), sample.stop_reason))

    first = Bench(decode_steps=4, listener=listen)
    first.admit("a", prompt_of(5), max_tokens=30, num_samples=2)
    for _ in range(4):
        first.send()
        first.absorb()
    second = Bench(decode_steps=4, listener=listen)
    second.batch.resume(first.batch.unanswered()["a"])
    second.run()
    for index, tokens in enumerate(second.tokens("a")):
        mine = [each[2:] for each in heard if each[:2] == ("a", index)]
        assert [tokens[: len(known)] for known, _ in mine] == [known for known, _ in mine]
        assert [len(known) for known, _ in mine] == sorted({len(known) for known, _ in mine})
        assert [reason for _, reason in mine] == [None] * (len(mine) - 1) + ["length"]
    assert len(heard) >= 2 * 30 // 4


class Sampling(RuleBasedStateMachine):
    """Requests come, go and are cancelled at any moment; tokens stay what they must be."""

    on_cpu = False

    def __init__(self):
        super().__init__()
        self.bench = Bench(shards=2, rows=3, pages=MAX_CONTEXT // PAGE_SIZE + 4, on_cpu=self.on_cpu)
        for version in ("v1", "v2", "v3", "v4"):
            self.bench.register(version)
        self.wanted = {}

    @rule(
        length=st.integers(1, 30),
        count=st.integers(1, 30),
        num_samples=st.integers(1, 8),
        version=st.sampled_from([BASE_MODEL, "v1", "v2", "v3", "v4"]),
        stop=st.sampled_from([[], [1], [5, 17, 40, 41, 42, 43]]),
    )
    def admit(self, length, count, num_samples, version, stop):
        name = f"request {len(self.wanted)}"
        options = {"max_tokens": count, "num_samples": num_samples, "stop": stop, "sampler": version}
        self.bench.admit(name, prompt_of(length), version, **options)
        self.wanted[name] = [
            expected(name, prompt_of(length), count, index=index, version=version, stop=stop)[0]
            for index in range(num_samples)
        ]

    @rule()
    def send(self):
        self.bench.send()

    @precondition(lambda self: self.bench.in_flight)
    @rule()
    def absorb(self):
        self.bench.absorb()

    @precondition(lambda self: self.wanted)
    @rule(choice=st.randoms())
    def cancel(self, choice):
        unanswered = sorted(self.wanted.keys() - self.bench.results.keys())
        if unanswered:
            name = choice.choice(unanswered)
            self.bench.batch.cancel(name)
            del self.wanted[name]
            self.wanted[f"{name}, cancelled"] = None

    @invariant()
    def answers_are_right(self):
        for name in self.bench.results:
            assert self.bench.tokens(name) == self.wanted[name]

    def teardown(self):
        self.bench.run()
        assert self.bench.results.keys() == {name for name, wanted in self.wanted.items() if wanted}
        self.answers_are_right()
        assert free_pages(self.bench) == [MAX_CONTEXT // PAGE_SIZE + 3] * 2


class SamplingOnCpu(Sampling):
    """The same where a Prefill runs row by row and all tables have one width."""

    on_cpu = True


for machine in (Sampling, SamplingOnCpu):
    machine.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestSampling, TestSamplingOnCpu = Sampling.TestCase, SamplingOnCpu.TestCase
