"""Decodes of other samples read chunks of long prompts, where that saves time, and all draw the same."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_tx.coordinator.sampling.riders import reply_of_chunks, saves_time
from spmd_tx.coordinator.sampling.shapes import SamplingShapes
from spmd_tx.protocol.commands import CHUNK_STEPS, Decode, Prefill
from spmd_tx.protocol.programs import ProgramShape
from tests.coordinator.sampling.bench import Bench, expected, free_pages, prompt_of

CHUNK = 8  # tokens
FAST, SLOW = 300.0, 0.5  # tokens that are computed while the weights are read


def bench(**options):
    return Bench(**({"prefill_tokens": CHUNK, "ridge": FAST, "pages": 80} | options))


def read_beside(its):
    """Return how many tokens of prompts Decodes have read."""
    chunks = [command.chunk for command in its.sent(Decode) if command.chunk is not None]
    return sum(int((chunk.positions >= 0).sum()) for chunk in chunks)


def read_alone(its):
    return sum(int((command.rows.segments > 0).sum()) for command in its.sent(Prefill))


def begin(its, **options):
    """Let a sample draw its first tokens."""
    its.admit("running", prompt_of(3), seed=1, max_tokens=40, **options)
    for _ in range(3):
        its.send()
        its.absorb()


@pytest.mark.parametrize("shards", [1, 2])
def test_a_long_prompt_does_not_stop_samples_that_run(shards):
    its = bench(shards=shards)
    begin(its)
    before = len(its.commands)
    its.admit("long", prompt_of(40, 5), seed=2, max_tokens=6)
    its.run()
    assert its.tokens("running") == [expected("", prompt_of(3), 40, seed=1)[0]]
    assert its.tokens("long") == [expected("", prompt_of(40, 5), 6, seed=2)[0]]
    assert its.logprobs("long") == [expected("", prompt_of(40, 5), 6, seed=2)[1]]
    assert read_beside(its) == 32  # all whole chunks but the last tokens of the prompt
    assert sum(isinstance(each, Prefill) for each in its.commands[before:]) == 1
    chunks = [command for command in its.sent(Decode) if command.chunk is not None]
    assert {command.steps for command in chunks} == {CHUNK_STEPS}


@pytest.mark.parametrize(
    "why",
    [
        {"ridge": 0.0},
        {"ridge": SLOW},
        {"batch_invariant": True},
        {"decode_steps": CHUNK_STEPS - 1},
        {"state_slots": 12},
    ],
    ids=lambda why: next(iter(why)) + str(next(iter(why.values()))),
)
def test_prompts_are_read_alone_where_a_decode_must_not_or_would_save_nothing(why):
    its = bench(**why)
    begin(its)
    its.admit("long", prompt_of(40, 5), seed=2, max_tokens=6)
    its.run()
    assert not read_beside(its)
    assert its.tokens("long") == [expected("", prompt_of(40, 5), 6, seed=2)[0]]


@pytest.mark.parametrize(
    "wish",
    [{"prompt_logprobs": True}, {"topk_prompt_logprobs": 2}],
    ids=["prompt_logprobs", "topk_prompt_logprobs"],
)
def test_tokens_that_are_scored_are_read_alone(wish):
    its, alone = bench(), bench(ridge=0.0)
    for each in (its, alone):
        begin(each)
        each.admit("scored", prompt_of(40, 5), seed=2, max_tokens=6, **wish)
        each.run()
    assert not read_beside(its)
    assert its.bodies["scored"] == alone.bodies["scored"]


def test_the_beginning_of_a_prompt_whose_end_is_scored_is_read_beside():
    its, alone = bench(), bench(ridge=0.0)
    for each in (its, alone):
        begin(each)
        each.admit(
            "scored", prompt_of(40, 5), seed=2, max_tokens=6, prompt_logprobs=True, prompt_logprobs_last_n=5
        )
        each.run()
    assert read_beside(its) == 32
    assert its.bodies["scored"] == alone.bodies["scored"]


def test_a_decode_waits_for_no_chunk_and_no_chunk_for_a_program():
    its = bench(on_demand=True)
    begin(its)
    its.admit("long", prompt_of(40, 5), seed=2, max_tokens=6)
    its.run()
    assert not read_beside(its)
    order = its.orders.next_order()
    while order is not None and not order.program.chunk:
        its.orders.settled(order, 1.0, None)
        order = its.orders.next_order()
    assert order is not None, "nobody ordered the program that would have been better"
    its.orders.settled(order, 1.0, None)
    its.admit("again", prompt_of(3), seed=1, max_tokens=40)
    its.send()
    its.admit("longer", prompt_of(40, 9), seed=2, max_tokens=6)
    its.run()
    assert read_beside(its)
    plain = [command for command in its.sent(Decode) if command.chunk is None]
    assert plain, "programs for chunks read nothing but chunks"


def test_a_prompt_that_is_cancelled_while_decodes_read_it_leaves_nothing_behind():
    its = bench()
    begin(its)
    its.admit("long", prompt_of(40, 5), seed=2, max_tokens=6)
    while not read_beside(its):
        its.send()
    its.batch.cancel("long")
    its.run()
    assert its.tokens("running") == [expected("", prompt_of(3), 40, seed=1)[0]]
    its.batch.start_over([])
    assert free_pages(its) == [79]


def test_a_prompt_that_makes_room_for_the_decode_is_not_read_by_it(monkeypatch):
    its, gone = bench(pages=23), []
    admission = its.batch._admission
    plan = admission.read_beside

    def watched(riders):
        gone.extend(rider for rider in riders if rider.is_given_up)
        written = plan(riders)
        assert not any(each.prefill in gone for each in written)
        return written

    monkeypatch.setattr(admission, "read_beside", watched)
    begin(its, num_samples=2)
    its.admit("long", prompt_of(40, 5), seed=2, max_tokens=6)
    its.run()
    assert gone, "nobody had to leave"
    assert read_alone(its) + read_beside(its) > 2 + 39, "what was lost is read again"
    assert its.tokens("long") == [expected("", prompt_of(40, 5), 6, seed=2)[0]]


def test_a_chunk_is_read_alone_when_no_decode_comes(monkeypatch):
    its = bench()
    begin(its)
    its.admit("long", prompt_of(40, 5), seed=2, max_tokens=6)
    riding = its.batch._admission.riding
    assert riding.decodes_read
    with monkeypatch.context() as patch:  # as where its program is missing
        patch.setattr(its.batch, "_plan_decode", lambda: setattr(riding, "decodes_read", False))
        its.send()
    assert isinstance(its.commands[-1], Prefill)
    its.run()
    assert its.tokens("long") == [expected("", prompt_of(40, 5), 6, seed=2)[0]]


requests = st.lists(
    st.tuples(
        *(st.integers(1, 50), st.integers(0, 3), st.integers(1, 12), st.integers(1, 3), st.integers(0, 3)),
    ),
    min_size=2,
    max_size=7,
)


@settings(max_examples=40, deadline=None)
@given(requests=requests, shards=st.integers(1, 2), pages=st.sampled_from([20, 26, 60]))
def test_samples_are_the_same_with_and_without_whatever_comes_when(requests, shards, pages):
    answers = []
    for ridge in (0.0, FAST):
        its = bench(shards=shards, pages=pages, ridge=ridge)
        for number, (length, offset, tokens, count, turns) in enumerate(requests):
            its.admit(
                str(number), prompt_of(length, offset), seed=number, max_tokens=tokens, num_samples=count
            )
            for _ in range(turns):
                if not its.send():
                    break
        its.run(depth=2)
        answers.append({name: its.tokens(name) for name in its.results})
    assert answers[0] == answers[1]


def test_prompts_take_turns():
    its = bench(rows=4)
    begin(its)
    for number in range(2):
        its.admit(f"long {number}", prompt_of(40, number), seed=2, max_tokens=3)
    its.run()
    order = [tuple(command.chunk.tokens[0]) for command in its.sent(Decode) if command.chunk is not None]
    first = [number for chunk in order for number in range(2) if chunk[0] in prompt_of(40, number)[:1]]
    assert sorted(first[:2]) == [0, 1], "one prompt is read to its end before the other begins"


@pytest.mark.parametrize(
    "ridge, rows, chunk, saves",
    [
        *((300.0, 1, 1024, True), (300.0, 128, 1024, True), (300.0, 512, 1024, False)),
        *((3000.0, 128, 1024, True), (4.0, 1, 1024, False), (4.0, 16, 1024, False)),
    ],
)
def test_the_prediction_compares_the_weights_that_are_read_again_with_the_arithmetic(
    ridge, rows, chunk, saves
):
    shapes = SamplingShapes(1, 4096, 16, decode_rows=rows, chunk_tokens=chunk, ridge=ridge)
    assert saves_time(shapes, rows) is saves


def test_experts_of_a_chunk_are_in_the_order_of_its_tokens():
    shards, tokens = 2, 3  # of a step
    numbers = np.arange(shards * CHUNK_STEPS * tokens).reshape(shards, CHUNK_STEPS, tokens)
    of_steps = np.swapaxes(numbers, 0, 1).reshape(CHUNK_STEPS, shards * tokens, 1, 1)
    more = np.concatenate([of_steps, np.zeros_like(of_steps)])  # of a Decode that may have more steps
    experts = reply_of_chunks({"chunk_experts": more}, shards)["experts"]
    assert np.array_equal(experts[..., 0, 0], numbers.reshape(shards, -1))


def test_a_program_beside_a_chunk_has_a_name_of_its_own():
    assert (
        str(ProgramShape(step="decode", rows=128, active=4, chunk=1024))
        == "decode beside a chunk of 1024, 128x4"
    )
