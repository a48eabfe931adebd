"""Prefill and decode: the sampler's numbers are the trainer's, and a row's tokens are its own affair."""

import functools
import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest

from spmd_tx.models import backbone, stack_product
from spmd_tx.models.sampling import draw
from spmd_tx.protocol.kernels import Kernels
from tests.models import reference
from tests.support.tiny_engine import (
    BOTH_SCALES,
    ENGINES,
    LENGTH,
    MODEL,
    ROWS,
    Datum,
    engine_name,
    mesh_name,
    slot_of,
    tiny_engine,
)
from tests.support.tiny_sampler import (
    MOST_STEPS,
    PAGE_SIZE,
    Place,
    Sample,
    TinySampler,
    go_on,
    random_prompt,
    run,
    sampler_weights,
    stand,
    tiny_sampler,
)

pytestmark = pytest.mark.usefixtures("quickly_compiled")

TOLERANCE = 1e-5  # nats; the promise is 1e-4
TOP = 4  # likeliest tokens

SAMPLES = [
    Sample(random_prompt(1, 13), slot=1, seed=(7, 9)),
    Sample(random_prompt(2, 1), slot=2, seed=(8, 9)),
    Sample(random_prompt(3, PAGE_SIZE * 3), slot=0, seed=(7, 9)),
]


def trainer_logprobs(engine, sample: Sample, drawn: np.ndarray) -> np.ndarray:
    """What ``forward`` says of prompt and drawn tokens."""
    sequence = np.concatenate([sample.prompt, drawn]).astype(np.int32)
    nothing = np.zeros(len(sequence) - 1, np.float32)
    datum = Datum(sample.slot, sequence[:-1], sequence[1:], nothing, nothing, nothing)
    logprobs, _ = engine.forward(sampler_weights(engine.model), [()] * (ROWS - 1) + [(datum,)])
    return logprobs[-1, : len(sequence) - 1]


@functools.cache
def on_one_device(kind: str = "dense"):
    return run(tiny_sampler(kind=kind).reset(), stand(SAMPLES))


SAMPLERS = [pytest.param(each, marks=pytest.mark.slow) if "grouped" in each else each for each in ENGINES]


@pytest.fixture(scope="module", params=SAMPLERS, ids=engine_name)
def sampler(request):
    shape, kind, split_base = request.param
    return tiny_sampler(shape, kind=kind, split_base=split_base).reset()


def test_the_sampler_agrees_with_the_trainer_and_with_one_device(sampler):
    places = stand(SAMPLES, shards=sampler.data_shards)
    drawn = run(sampler, places)
    for sample, one, expected in zip(SAMPLES, drawn, on_one_device(sampler.engine.kind), strict=True):
        assert np.array_equal(one.tokens, expected.tokens)
        assert len(one.tokens) == sample.max_tokens
        trainer = trainer_logprobs(sampler.engine, sample, one.tokens)[len(sample.prompt) - 1 :]
        np.testing.assert_allclose(one.logprobs, trainer, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1, 2), (2, 2, 1)], ids=mesh_name)
def test_a_decode_may_read_matrices_and_factors_where_all_layers_stack_them(shape, monkeypatch):
    """As on GPUs, but for the kernel."""
    found = list[tuple[int, ...]]()

    def product_of_stack(x, w, layer, plus=None, *, transposed=False, interpret=False):
        found.append(w.shape)
        y = x @ (w[layer].T if transposed else w[layer])
        return y if plus is None else y + plus[0] @ plus[1][layer]

    monkeypatch.setattr(stack_product, "stack_product", product_of_stack)
    monkeypatch.setattr(stack_product, "LEAST_ROWS", 1)
    monkeypatch.setattr(backbone, "reads_stack", lambda shape, rows: True)
    sampler = TinySampler(tiny_engine(shape), np.float32, Kernels("gpu", products="triton"))
    drawn = run(sampler, stand(SAMPLES, shards=sampler.data_shards))
    assert len(found) == 2 * 7, "each map's matrix and factors"
    for one, expected in zip(drawn, on_one_device(), strict=True):
        assert np.array_equal(one.tokens, expected.tokens)
        np.testing.assert_allclose(one.logprobs, expected.logprobs, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_in_bfloat16_the_sampler_stays_close_to_the_trainer():
    """Kernels for one token and for many round differently: at most four steps of bfloat16 at 4 nats."""
    sampler = tiny_sampler((1, 1, 1), "bfloat16").reset()
    furthest = 0.0
    for sample, one in zip(SAMPLES, run(sampler, stand(SAMPLES)), strict=True):
        trainer = trainer_logprobs(sampler.engine, sample, one.tokens)[len(sample.prompt) - 1 :]
        furthest = max(furthest, float(np.abs(one.logprobs - trainer).max()))
    print(f"furthest apart: {furthest:.4f} nats")
    assert furthest < 0.125


def test_prompt_logprobs_agree_with_the_trainer(sampler):
    places = stand(SAMPLES, shards=sampler.data_shards)
    with_prompt = [place for place in places if len(place.sample.prompt) > 1]
    for place, logprobs in zip(with_prompt, sampler.prefill(with_prompt), strict=True):
        trainer = trainer_logprobs(sampler.engine, place.sample, np.zeros(0, np.int32))
        np.testing.assert_allclose(logprobs, trainer, rtol=0, atol=TOLERANCE)


@jax.jit
def reference_logits(base, adapter, scales, tokens):
    return reference.logits(MODEL, base, adapter, scales, tokens)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7, 0.0])
def test_a_logprob_is_that_of_the_logits_over_the_temperature(temperature):
    sample = replace(SAMPLES[0], temperature=temperature)
    (drawn,) = run(tiny_sampler().reset(), stand([sample]))
    sequence = np.concatenate([sample.prompt, drawn.tokens])
    tokens = np.pad(sequence, (0, LENGTH - len(sequence))).astype(np.int32)
    adapter = slot_of(sampler_weights(), sample.slot)
    logits = np.asarray(reference_logits(tiny_engine().base, adapter, BOTH_SCALES[sample.slot], tokens))
    logits = logits[len(sample.prompt) - 1 : len(sequence) - 1].astype(np.float64) / (temperature or 1)
    expected = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    np.testing.assert_allclose(
        drawn.logprobs, expected[np.arange(len(drawn.tokens)), drawn.tokens], rtol=0, atol=TOLERANCE
    )
    if temperature == 0:
        assert np.array_equal(drawn.tokens, np.argmax(logits, axis=-1))


def test_top_k_one_is_greedy():
    greedy, top_k, top_p = run(
        tiny_sampler().reset(),
        stand([replace(SAMPLES[0], **one) for one in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6})]),
    )
    assert np.array_equal(greedy.tokens, top_k.tokens)
    assert np.array_equal(greedy.tokens, top_p.tokens)


def test_samples_with_different_seeds_differ():
    samples = [replace(SAMPLES[0], seed=seed) for seed in ((0, 0), (0, 1), (1, 0))]
    drawn = run(tiny_sampler().reset(), stand(samples))
    assert len({tuple(one.tokens.tolist()) for one in drawn}) == 3


NOISY = [Sample(random_prompt(20 + i, 5 + i), slot=i, temperature=1.5, top_k=9, top_p=0.8) for i in range(3)]


@pytest.mark.parametrize(
    "samples, rows, how",
    [
        ([SAMPLES[0]], [3], {}),
        ([*NOISY, SAMPLES[0]], None, {}),
        ([NOISY[1], SAMPLES[0], NOISY[0]], [3, 1, 0], {}),
        pytest.param([SAMPLES[0]], [0], {"rows": 1}, marks=pytest.mark.slow),  # each is another program
        ([NOISY[0], SAMPLES[0]], [2, 13], {"rows": 16}),
        pytest.param([SAMPLES[0]], [2], {"width": 16}, marks=pytest.mark.slow),
    ],
    ids=["another row", "company", "company in other rows", "one row", "sixteen rows", "a wider table"],
)
def test_tokens_do_not_depend_on_company_rows_or_bucket(samples, rows, how):
    drawn = run(tiny_sampler().reset(), stand(samples, rows), **how)[samples.index(SAMPLES[0])]
    assert np.array_equal(drawn.tokens, on_one_device()[0].tokens)
    np.testing.assert_allclose(drawn.logprobs, on_one_device()[0].logprobs, rtol=0, atol=TOLERANCE)


def test_tokens_do_not_depend_on_the_data_shard():
    """On two data shards, with everybody else in the other one."""
    sampler = tiny_sampler((2, 1, 4)).reset()
    ours = replace(stand([SAMPLES[0]])[0], shard=1, row=2)
    drawn = run(sampler, [ours, *stand(NOISY)])[0]
    assert np.array_equal(drawn.tokens, on_one_device()[0].tokens)


def test_a_row_ends_after_its_tokens_and_then_replies_minus_one():
    sampler = tiny_sampler().reset()
    places = stand([replace(SAMPLES[0], max_tokens=3), SAMPLES[2]], rows=[2, 0])
    sampler.prefill(places)
    (short, long), whole = sampler.decode_all(places)
    assert np.array_equal(short.tokens[:3], on_one_device()[0].tokens[:3])
    assert np.array_equal(short.tokens[3:], np.full(MOST_STEPS - 3, -1))
    assert not np.any(short.logprobs[3:])
    assert np.all(long.tokens >= 0)
    assert np.all(whole.tokens[:, [1, 3]] == -1)  # rows that nobody stands in
    (again, _) = sampler.decode(go_on(places))
    assert np.all(again.tokens == -1)


def test_a_dispatch_takes_no_more_steps_than_it_is_told_and_the_next_one_goes_on():
    sampler = tiny_sampler().reset()
    places = stand([SAMPLES[0]])
    sampler.prefill(places)
    ((first,), whole) = sampler.decode_all(places, steps=3)
    assert np.all(whole.tokens[3:] == -1)
    (second,) = sampler.decode(go_on(places), steps=5)
    assert np.array_equal((first + second).tokens, on_one_device()[0].tokens[:8])


def test_a_stop_token_is_drawn_with_its_logprob_and_ends_its_row_only():
    free = on_one_device()[0]
    stop = int(free.tokens[4])
    length = free.tokens.tolist().index(stop) + 1
    sampler = tiny_sampler().reset()
    stopped, other = run(sampler, stand([replace(SAMPLES[0], stops=(999, stop)), SAMPLES[2]]))
    assert np.array_equal(stopped.tokens, free.tokens[:length])
    np.testing.assert_allclose(stopped.logprobs, free.logprobs[:length], rtol=0, atol=TOLERANCE)
    assert np.array_equal(other.tokens, on_one_device()[2].tokens)


def test_rows_go_on_wherever_they_move_while_others_leave_and_come():
    sampler = tiny_sampler().reset()
    first, newcomer, third = stand(SAMPLES, rows=[3, 1, 0])
    sampler.prefill([first, third])
    before = sampler.decode([first, third], steps=5)
    moved = [replace(first, row=0, source=3), replace(newcomer, row=3), replace(third, row=2, source=0)]
    after = sampler.decode(moved)
    assert np.array_equal((before[0] + after[0]).tokens, on_one_device()[0].tokens[:13])
    assert np.array_equal((before[1] + after[2]).tokens, on_one_device()[2].tokens[:13])
    assert np.array_equal(after[1].tokens, on_one_device()[1].tokens[:8])
    # Out of a dispatch of sixteen rows, too.
    (last,) = sampler.decode([replace(first, row=11, source=0)], rows=16, steps=3)
    assert np.array_equal(last.tokens, on_one_device()[0].tokens[13:16])


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 4)], ids=mesh_name)
def test_samples_of_one_prompt_share_its_full_pages_and_copy_the_last(shape):
    """13 - 1 prompt tokens with pages of 8: page 0 of the prompt is shared, page 1 is copied."""
    sampler = tiny_sampler(shape).reset(stale=np.nan)
    shard = sampler.data_shards - 1
    other = replace(SAMPLES[0], seed=(123, 4))
    (first, second) = (replace(place, shard=shard) for place in stand([SAMPLES[0], other]))
    shared = np.concatenate([first.pages[:1], second.pages[1:]])
    sampler.prefill([first], copies=[(shard, int(first.pages[1]), int(second.pages[1]))])
    sharing = [first, replace(second, pages=shared)]
    pairs = zip(sampler.decode(sharing), sampler.decode(go_on(sharing)), strict=True)
    drawn = [(a + b).living() for a, b in pairs]
    assert np.array_equal(drawn[0].tokens, on_one_device()[0].tokens)
    (alone,) = run(tiny_sampler().reset(), stand([other]))
    assert np.array_equal(drawn[1].tokens, alone.tokens)
    np.testing.assert_allclose(drawn[1].logprobs, alone.logprobs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("stale", [np.nan, np.inf, 3e38], ids=str)
def test_what_earlier_owners_left_in_the_pages_does_not_matter(stale):
    drawn = run(tiny_sampler().reset(stale=stale), stand(SAMPLES))
    for one, expected in zip(drawn, on_one_device(), strict=True):
        assert np.array_equal(one.tokens, expected.tokens)
        assert np.array_equal(one.logprobs, expected.logprobs)


def test_a_dead_row_writes_to_no_page_that_is_in_use():
    """A row that died keeps its table until the next dispatch; its pages may be somebody else's by then."""
    sampler = tiny_sampler().reset()
    victim, dying = stand([SAMPLES[0], replace(SAMPLES[2], max_tokens=2)])
    sampler.prefill([victim, dying])
    dying = Place(dying.sample, dying.pages, row=1)
    before = sampler.decode([victim, dying])
    on_the_same_pages = replace(dying, pages=victim.pages, source=1)
    after = sampler.decode([replace(victim, source=0), on_the_same_pages])
    assert np.all(after[1].tokens == -1)
    assert np.array_equal((before[0] + after[0]).tokens, on_one_device()[0].tokens)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [1e4, 1e30, 3e38], ids=str)
def test_a_tenant_with_huge_weights_spoils_its_own_samples_only(dtype, value):
    w = sampler_weights()
    for leaf in jax.tree.leaves(w):
        leaf[..., 3, :, :] = value
    sampler = tiny_sampler((1, 1, 1), dtype)
    expected = run(sampler.reset(), stand(SAMPLES))
    samples = [*SAMPLES, Sample(random_prompt(5, 9), slot=3)]
    *drawn, _ = run(sampler.reset(w=w), stand(samples))
    for one, wanted in zip(drawn, expected, strict=True):
        assert np.array_equal(one.tokens, wanted.tokens)
        assert np.array_equal(one.logprobs, wanted.logprobs)


@pytest.mark.parametrize("first", [PAGE_SIZE, 2 * PAGE_SIZE])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 4)], ids=mesh_name)
def test_a_prompt_goes_on_behind_the_pages_that_another_one_has_filled(shape, first):
    """Pages of the first tokens are shared, the others are new and hold rubbish."""
    sampler = tiny_sampler(shape).reset(stale=np.nan)
    long = Sample(random_prompt(4, 4 * PAGE_SIZE - 3), slot=1, seed=(5, 6))
    whole, shared = (stand([each])[0] for each in (long, replace(long, seed=(7, 8))))
    expected = sampler.prefill([whole])[0]
    shared = replace(shared, pages=np.concatenate([whole.pages[: first // PAGE_SIZE], whole.pages[2:] + 20]))
    if first == PAGE_SIZE:
        shared.pages[1] = 30
    ((logprobs, _),) = sampler.prefill_all([shared], first=first)
    np.testing.assert_allclose(logprobs, expected[first:], rtol=0, atol=TOLERANCE)
    (drawn,) = sampler.decode([shared])
    alone = run(tiny_sampler().reset(), stand([shared.sample]))[0]
    np.testing.assert_array_equal(drawn.tokens, alone.tokens[: len(drawn.tokens)])
    np.testing.assert_allclose(drawn.logprobs, alone.logprobs[: len(drawn.tokens)], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["dense", pytest.param("mixture", marks=pytest.mark.slow)])
def test_a_prompt_that_is_read_in_pieces_is_what_it_is_in_one(kind):
    """Log-probabilities of the prompt, the experts of its tokens, and what is drawn behind it."""
    sampler = tiny_sampler(kind=kind).reset(stale=np.nan)
    long = Sample(random_prompt(6, 4 * PAGE_SIZE - 3), slot=1, seed=(5, 6))
    (place,) = stand([long])
    ((whole, whole_experts),) = sampler.prefill_all([place])
    expected = sampler.decode([place])[0]
    sampler.reset(stale=np.nan)
    logprobs, experts = [], []
    for first, end in [
        (0, PAGE_SIZE + 3),
        (PAGE_SIZE + 3, 3 * PAGE_SIZE),
        (3 * PAGE_SIZE, len(long.prompt) - 1),
    ]:
        piece = replace(place, sample=replace(long, prompt=long.prompt[: end + 1]))
        ((some, some_experts),) = sampler.prefill_all([piece], first=first)
        logprobs.append(some)
        experts.append(some_experts)
    np.testing.assert_allclose(np.concatenate(logprobs), whole, rtol=0, atol=TOLERANCE)
    assert np.array_equal(np.concatenate(experts), whole_experts)
    (drawn,) = sampler.decode([place])
    assert np.array_equal(drawn.tokens, expected.tokens)
    np.testing.assert_allclose(drawn.logprobs, expected.logprobs, rtol=0, atol=TOLERANCE)


def test_devices_that_draw_differently_all_take_the_token_of_the_first(monkeypatch):
    """As if they rounded differently: without this they would write keys and values of other tokens."""
    devices = itertools.count()

    def draw_apart(*arguments):
        token_B, *rest = draw(*arguments)
        apart = jax.pure_callback(lambda: np.int32(next(devices)), jax.ShapeDtypeStruct((), np.int32))
        return (token_B + apart) % MODEL.vocab_size, *rest

    monkeypatch.setattr("spmd_tx.worker.steps.sample.draw", draw_apart)
    sampler = TinySampler(tiny_engine((1, 1, 4)), np.float32)
    sampler.decode(stand([SAMPLES[0]]), steps=1)
    assert next(devices) >= 4, "each has drawn"
    tokens = {int(shard.data[0]) for shard in sampler.rows.tokens.addressable_shards}
    assert len(tokens) == 1


@pytest.mark.parametrize("shape", [(1, 1, 4), pytest.param((2, 1, 2), marks=pytest.mark.slow)], ids=mesh_name)
def test_on_accelerators_tokens_are_the_same_though_no_device_has_whole_logits(shape):
    sampler = TinySampler(tiny_engine(shape), np.float32, Kernels("tpu"))
    samples = [SAMPLES[0], replace(SAMPLES[0], temperature=0.0), NOISY[1]]
    places = stand(samples, shards=sampler.data_shards)
    sampler.prefill(places)
    found = sampler.decode_top(places, TOP)
    assert np.array_equal(found[0].tokens, on_one_device()[0].tokens[:MOST_STEPS])
    expected = tiny_sampler((2, 1, 4)).reset()  # where test_prompt_scores.py has it, too
    beside = stand(samples, shards=expected.data_shards)
    expected.prefill(beside)
    for one, other in zip(found, expected.decode_top(beside, TOP), strict=True):
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.top_tokens, other.top_tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(one.top_logprobs, other.top_logprobs, rtol=0, atol=TOLERANCE)
