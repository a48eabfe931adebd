"""Samples that speculate draw the tokens of others in fewer steps, and nothing from behind a wrong draft."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_tx.protocol.commands import REJECTED, Decode
from tests.coordinator.sampling.bench import Bench, expected, free_pages, prompt_of

PROMPT = prompt_of(9)


def followers(command):
    return 0 if command.depths is None else int((command.depths > 0).sum())


def steps(bench):
    """Return how many steps of Decodes there were in which any row lived."""
    return sum(int((reply["tokens"] >= 0).any(axis=1).sum()) for reply in bench.decoded)


class WatchedBench(Bench):
    """Keeps the replies to Decodes."""

    def __init__(self, **options):
        super().__init__(rows=16, **options)
        self.decoded, execute = [], self.device.execute

        def watched(command):
            arrays, numbers = execute(command)
            if isinstance(command, Decode):
                self.decoded.append(arrays)
            return arrays, numbers

        self.device.execute = watched


@pytest.mark.parametrize("state_slots", [0, 40])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("shards", [1, 2])
def test_an_answer_that_was_given_before_takes_fewer_steps(shards, batch_invariant, state_slots):
    counts, options = {}, {"batch_invariant": batch_invariant, "state_slots": state_slots}
    for speculates in (False, True):
        bench = WatchedBench(shards=shards, speculates=speculates, **options)
        bench.admit("first", PROMPT, seed=3, max_tokens=40, sampler="s:sample:1")
        bench.run()
        before = steps(bench)
        bench.admit("again", PROMPT, seed=3, max_tokens=40, sampler="s:sample:2")
        bench.run()
        assert bench.tokens("again") == bench.tokens("first") == [expected("", PROMPT, 40, seed=3)[0]]
        assert bench.logprobs("again") == bench.logprobs("first")
        counts[speculates] = steps(bench) - before
    assert counts[False] == 40
    assert counts[True] <= 20


def test_no_session_learns_from_another():
    bench = WatchedBench(speculates=True)
    bench.admit("first", PROMPT, seed=3, max_tokens=40, sampler="one:sample:1")
    bench.run()
    bench.admit("again", PROMPT, seed=3, max_tokens=40, sampler="two:sample:1")
    bench.run()
    assert not any(map(followers, bench.sent(Decode)))


def test_drafts_that_have_never_been_right_are_not_read():
    bench = WatchedBench(speculates=True)
    for number in range(6):
        bench.admit(f"{number}", PROMPT, seed=number, max_tokens=40, sampler="s:sample:1")
        bench.run()
    assert not any(map(followers, bench.sent(Decode)))


def test_a_wrong_draft_changes_nothing_and_is_tried_no_more():
    bench = WatchedBench(speculates=True)
    for name in ("first", "again"):
        bench.admit(name, PROMPT, seed=3, max_tokens=40, sampler="s:sample:1")
        bench.run()
    for number in range(6):  # alike at the beginning, and then no more
        name = f"other {number}"
        bench.admit(name, PROMPT, seed=number + 10, max_tokens=40, sampler="s:sample:2")
        bench.run()
        assert bench.tokens(name) == [expected(name, PROMPT, 40, seed=number + 10)[0]]
    rejected = [int((reply["tokens"] == REJECTED).any(axis=1).sum()) for reply in bench.decoded]
    assert 0 < sum(rejected) <= 24  # of 240 steps


def test_a_full_batch_does_not_speculate():
    bench = WatchedBench(pages=300, speculates=True)
    for number in range(2):
        bench.admit(f"{number}", PROMPT, seed=3, max_tokens=20, num_samples=16, sampler=f"s:sample:{number}")
        bench.run()
    assert not any(map(followers, bench.sent(Decode)))


def test_rows_of_a_stop_token_end_there():
    stop = expected("", PROMPT, 40, seed=3)[0][28]
    bench = WatchedBench(speculates=True)
    for name in ("first", "again"):
        bench.admit(name, PROMPT, seed=3, max_tokens=40, stop=[stop], sampler="s:sample:1")
        bench.run()
        assert bench.tokens(name) == [expected("", PROMPT, 40, seed=3, stop=(stop,))[0]]
    assert any(map(followers, bench.sent(Decode)))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("shards", [1, 2])
def test_what_the_model_expects_is_read_at_once(shards, batch_invariant):
    bench = WatchedBench(
        shards=shards, speculates=True, expects=lambda position: True, batch_invariant=batch_invariant
    )
    bench.admit("first", PROMPT, seed=3, max_tokens=40)
    bench.run()
    assert bench.tokens("first") == [expected("", PROMPT, 40, seed=3)[0]]
    assert steps(bench) <= 21  # nothing is known before the first


def test_a_model_that_is_never_right_is_believed_no_more():
    bench = WatchedBench(speculates=True, expects=lambda position: False)
    for number in range(4):
        bench.admit(f"{number}", PROMPT, seed=number, max_tokens=40, sampler="s:sample:1")
        bench.run()
        assert bench.tokens(f"{number}") == [expected("", PROMPT, 40, seed=number)[0]]
    rejected = [int((reply["tokens"] == REJECTED).any(axis=1).sum()) for reply in bench.decoded]
    assert 0 < sum(rejected) <= 8  # of 160 steps


def test_texts_that_are_right_win_over_a_model_that_often_is():
    counts = {}
    for name in ("same", "other"):
        bench = WatchedBench(speculates=True, expects=lambda position: position % 3)
        for number, seed in enumerate((3, 3 if name == "same" else 4)):
            before = steps(bench)
            bench.admit(f"{number}", PROMPT, seed=seed, max_tokens=40, sampler="s:sample:1")
            bench.run()
            assert bench.tokens(f"{number}") == [expected("", PROMPT, 40, seed=seed)[0]]
        counts[name] = steps(bench) - before
    assert counts["same"] < 20 < counts["other"] < 32


REQUESTS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 30), st.integers(1, 3), st.integers(0, 4)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=25, deadline=None)
@given(
    REQUESTS,
    st.sampled_from([20, 60]),
    st.sampled_from([0, 18, 40]),
    st.booleans(),
    st.integers(1, 3),
    st.booleans(),
)
def test_whatever_else_runs_and_leaves_for_lack_of_room(
    requests, pages, slots, batch_invariant, depth, predicts
):
    expects = (lambda position: position % 3) if predicts else None
    options = {"state_slots": slots, "batch_invariant": batch_invariant, "expects": expects}
    bench = WatchedBench(pages=pages, speculates=True, **options)
    free = free_pages(bench)
    asked = {}
    for number, (prompt, seed, count, samples, pause) in enumerate(requests):
        name, tokens = f"r{number}", prompt_of(5 + prompt, prompt)
        options = {"seed": seed, "max_tokens": count, "num_samples": samples}
        bench.admit(name, tokens, sampler="s:sample:1", **options)
        asked[name] = tokens, seed, count, samples
        for _ in range(pause):
            while len(bench.in_flight) < depth and bench.send():
                pass
            if bench.in_flight:
                bench.absorb()
    bench.run(depth)
    for name, (tokens, seed, count, samples) in asked.items():
        want = [expected(name, tokens, count, index=index, seed=seed)[0] for index in range(samples)]
        assert bench.tokens(name) == want
    assert free_pages(bench) == free
    assert not np.any([followers(command) > 15 for command in bench.sent(Decode)])
