"""Long prompts are read chunk by chunk; others go on between the chunks, and nothing else changes."""

import random
from itertools import groupby

import numpy as np
import pytest
from tinker.proto.response_conv import deserialize_sample_response

from spmd_tx.coordinator.sampling.bank import BASE_MODEL
from spmd_tx.coordinator.wire.fields import TensorData
from spmd_tx.protocol.commands import Decode, Prefill
from tests.coordinator.sampling.bench import (
    MAX_CONTEXT,
    MODEL,
    PAGE_SIZE,
    Bench,
    expected,
    free_pages,
    prompt_of,
)
from tests.coordinator.sampling.fake_device import BASE, score
from tests.support.model_shapes import resized

CHUNK = 16
WISHES = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "prompt_alt_tokens_k": 2}


def chunks(bench):
    """(first position, tokens) of every row of every Prefill."""
    rows = [
        (row, command.rows)
        for command in bench.sent(Prefill)
        for row in range(len(command.rows.tokens))
        if command.rows.segments[row].any()
    ]
    return [(int(rows.positions[row, 0]), int((rows.segments[row] > 0).sum())) for row, rows in rows]


def test_a_prompt_is_cut_at_multiples_of_a_chunk():
    bench = Bench(prefill_tokens=CHUNK)
    bench.admit("a", prompt_of(45), max_tokens=5)
    bench.run()
    assert chunks(bench) == [(0, 16), (16, 16), (32, 12)]
    assert bench.tokens("a") == [expected("a", prompt_of(45), 5)[0]]


@pytest.mark.parametrize("num_samples", [1, 3, 9])
@pytest.mark.parametrize("length", [18, 33, 34, 50])
def test_everything_is_as_it_is_in_one_chunk(length, num_samples):
    prompt, bodies = prompt_of(length), []
    targets = TensorData([float(token) for token in prompt[1:]], "int64", [length - 1, 1])
    for chunk in (CHUNK, 256):
        bench = Bench(prefill_tokens=chunk, pages=100)
        bench.admit(
            "a",
            prompt,
            max_tokens=9,
            num_samples=num_samples,
            target_prompt_logprobs=targets,
            seed=1,
            **WISHES,
        )
        bench.run()
        assert (len(chunks(bench)) > 1) == (chunk == CHUNK)
        bodies.append(bench.bodies["a"])
    assert bodies[0] == bodies[1]


def test_only_chunks_of_which_something_is_wanted_are_scored():
    bench, prompt = Bench(prefill_tokens=CHUNK), prompt_of(50)
    bench.admit("a", prompt, max_tokens=2, prompt_logprobs=True, prompt_logprobs_last_n=20)
    bench.run()
    assert [command.logprobs for command in bench.sent(Prefill)] == [False, True, True, True]
    wanted = [score(BASE, prompt[:place], prompt[place]) for place in range(30, 50)]
    assert bench.prompt_logprobs("a")[30:] == wanted
    assert np.isnan(bench.prompt_logprobs("a")[:30]).all()


def test_rows_draw_between_the_chunks_of_a_long_prompt():
    bench = Bench(prefill_tokens=CHUNK, pages=100)
    bench.admit("running", prompt_of(3), max_tokens=50)
    for _ in range(2):
        bench.send()
    bench.admit("long", prompt_of(60, 1), max_tokens=4)
    bench.run()
    kinds = [kind for kind, _ in groupby(bench.commands, type)]
    assert sum(1 for command in bench.commands if isinstance(command, Prefill)) == 5
    assert kinds.count(Prefill) == 5, "two chunks without a Decode between them"
    assert bench.tokens("running") == [expected("running", prompt_of(3), 50)[0]]


def test_a_short_prompt_waits_for_one_chunk_of_a_long_one_at_most():
    bench = Bench(prefill_tokens=CHUNK, pages=100)
    bench.admit("long", prompt_of(62), max_tokens=2)
    bench.send()
    bench.admit("short", prompt_of(9, 1), max_tokens=2)
    bench.send()
    bench.send()
    assert [command.rows.positions[0, 0] for command in bench.sent(Prefill) if command.tables is None] == [
        0,
        0,
    ]
    bench.run()
    assert list(bench.results) == ["short", "long"]


def test_two_long_prompts_take_turns():
    bench = Bench(prefill_tokens=CHUNK, pages=100)
    bench.admit("a", prompt_of(60), max_tokens=2)
    bench.admit("b", prompt_of(30, 1), max_tokens=2)
    bench.run()
    assert [first for first, _ in chunks(bench)] in ([0, 0, 16, 16, 32, 48], [0, 16, 0, 32, 16, 48])
    assert list(bench.results) == ["b", "a"]


def test_samples_that_come_later_wait_until_the_prompt_is_read_and_then_share_it():
    bench, prompt = Bench(rows=2, prefill_tokens=CHUNK, pages=60), prompt_of(50)
    bench.admit("a", prompt, max_tokens=3, num_samples=7)
    bench.run()
    assert bench.tokens("a") == [expected("a", prompt, 3, index=index)[0] for index in range(7)]
    assert len(chunks(bench)) == 4


def test_a_beginning_that_is_cached_is_not_read_again_and_chunks_that_are_read_are_found():
    bench, prompt = Bench(prefill_tokens=CHUNK, pages=100), prompt_of(60)
    bench.admit("a", prompt[:30], max_tokens=1)
    bench.run()
    bench.admit("b", prompt, max_tokens=4, seed=2)
    bench.send()
    bench.admit("c", prompt, max_tokens=4, seed=2)
    bench.run()
    assert chunks(bench)[2] == (28, 4)
    assert bench.hits("b") == 28
    assert bench.tokens("b") == bench.tokens("c") == [expected("", prompt, 4, seed=2)[0]]


@pytest.mark.parametrize("sent", range(1, 6))
def test_a_request_may_be_cancelled_between_two_chunks(sent):
    bench = Bench(prefill_tokens=CHUNK, pages=100)
    before = free_pages(bench)
    bench.admit("a", prompt_of(55), max_tokens=9, num_samples=3, **WISHES)
    for _ in range(sent):
        bench.send()
    bench.batch.cancel("a")
    assert free_pages(bench) == before
    bench.admit("b", prompt_of(55), max_tokens=9, num_samples=3)
    bench.run()
    assert bench.results.keys() == {"b"}
    assert bench.tokens("b") == [expected("b", prompt_of(55), 9, index=index)[0] for index in range(3)]


def test_who_makes_room_between_two_chunks_starts_again_and_gets_all_that_was_wanted():
    room = MAX_CONTEXT // PAGE_SIZE
    prompt, wanted = prompt_of(30, 1), {}
    for pages in (200, room + 1):
        bench = Bench(prefill_tokens=CHUNK, pages=pages, decode_steps=4)
        bench.admit("old", prompt_of(5), max_tokens=59)
        for _ in range(3):
            bench.send()
            bench.absorb()
        bench.admit("young", prompt, max_tokens=9, num_samples=3, seed=3, **WISHES)
        bench.run()
        wanted[pages] = bench.bodies
    assert len(chunks(bench)) > 3, "nobody had to make room"
    assert wanted[200] == wanted[room + 1]


def test_of_experts_every_token_of_a_prompt_is_told_once():
    """The fake device has none, so the replies are given them: the position of each token."""
    bench = Bench(prefill_tokens=CHUNK, model=resized(MODEL, n_experts=4, experts_per_token=1))
    bench.admit("a", prompt_of(40), max_tokens=3)
    job = bench.batch.unanswered()["a"]
    while bench.batch.waiting() or bench.in_flight:
        while len(bench.in_flight) < 3 and bench.send():
            pass
        dispatch, reply = bench.in_flight[0]
        command = dispatch.command
        if isinstance(command, Prefill):
            reply.arrays["experts"] = command.rows.positions[..., None, None].astype(np.uint8)
        elif isinstance(command, Decode):
            reply.arrays["experts"] = np.zeros((*reply.arrays["tokens"].shape, 1, 1), np.uint8)
        bench.absorb()
    assert job.prompt_experts[:, 0, 0].tolist() == list(range(39))


def test_another_batch_reads_a_prompt_from_its_beginning():
    first = Bench(prefill_tokens=CHUNK)
    first.admit("a", prompt_of(60), max_tokens=5, num_samples=2, **WISHES)
    for _ in range(2):
        first.send()
        first.absorb()
    whole, second = Bench(), Bench(prefill_tokens=CHUNK)
    whole.admit("a", prompt_of(60), max_tokens=5, num_samples=2, **WISHES)
    whole.run()
    second.batch.resume(first.batch.unanswered()["a"])
    second.run()
    assert second.bodies["a"] == whole.bodies["a"]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("shards", [1, 2])
def test_in_hardly_any_room_every_request_of_every_tenant_is_answered_as_if_it_were_alone(seed, shards):
    """Many tenants and versions, groups larger than the cache, long prompts, cancelled requests."""
    chance = random.Random(seed)
    room = MAX_CONTEXT // PAGE_SIZE
    bench = Bench(
        shards=shards,
        rows=chance.choice([1, 3, 6]),
        pages=1 + room + chance.choice([0, 1, 7]),
        decode_steps=chance.choice([2, 8]),
        prefill_tokens=CHUNK,
        slots=4,
    )
    versions = [BASE_MODEL, "v1", "v2", "v3"]
    for version in versions[1:]:
        bench.register(version)
    wanted, number = {}, 0
    while number < 25 or bench.batch.waiting() or bench.in_flight:
        if number < 25 and chance.random() < 0.4:
            name, prompt, version = (
                f"{number}",
                prompt_of(chance.randint(1, 55), number % 3),
                chance.choice(versions),
            )
            count, samples = chance.randint(1, 64 - len(prompt)), chance.choice([1, 1, 2, 20])
            scored = {"prompt_logprobs": True} if chance.random() < 0.3 else {}
            bench.admit(
                name,
                prompt,
                version,
                max_tokens=count,
                num_samples=samples,
                sampler=f"{number % 5}",
                stop=[],
                **scored,
            )
            wanted[name] = (
                prompt,
                [
                    expected(
                        name, prompt, count, index=index, version=BASE if version == BASE_MODEL else version
                    )[0]
                    for index in range(samples)
                ],
            )
            number += 1
        elif chance.random() < 0.03 and (open_ones := sorted(wanted.keys() - bench.results.keys())):
            name = chance.choice(open_ones)
            bench.batch.cancel(name)
            del wanted[name]
        elif len(bench.in_flight) < 3 and bench.send():
            continue
        elif bench.in_flight:
            bench.absorb()
        else:
            assert number < 25 or not bench.batch.waiting(), "nothing can be sent and nothing is on its way"
    assert bench.results.keys() == wanted.keys()
    for name, (prompt, samples) in wanted.items():
        assert bench.tokens(name) == samples
        scores = deserialize_sample_response(bench.bodies[name]).prompt_logprobs
        assert scores is None or len(scores) == len(prompt)
    assert free_pages(bench) == [bench.device.tokens.shape[1] - 1] * shards


@pytest.mark.parametrize("batch_invariant", [True, False])
@pytest.mark.parametrize("length", [MAX_CONTEXT - 1, MAX_CONTEXT])
@pytest.mark.parametrize("max_tokens", [0, 1, None])
@pytest.mark.parametrize("options", [{}, {"topk_prompt_logprobs": 2}])
def test_a_prompt_that_fills_the_context_is_scored(batch_invariant, length, max_tokens, options):
    full = MAX_CONTEXT // PAGE_SIZE + 1  # pages: one sample of the whole context, and the trash page
    bench = Bench(batch_invariant=batch_invariant, pages=full, on_demand=True)
    prompt = prompt_of(length)
    bench.admit("scored", prompt, max_tokens=max_tokens, prompt_logprobs=True, stop=[], **options)
    bench.run()
    wanted = [score(BASE, prompt[:place], prompt[place]) for place in range(1, length)]
    assert bench.prompt_logprobs("scored")[1:] == wanted
    (drawn,) = bench.tokens("scored")
    assert drawn == ([] if max_tokens == 0 else expected("scored", prompt, 1)[0])
    assert free_pages(bench) == [full - 1]
