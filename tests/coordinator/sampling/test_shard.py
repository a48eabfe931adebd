import pytest

from spmd_tx.coordinator.sampling.job import Sample, SampleJob
from spmd_tx.coordinator.sampling.request import prompt_scores
from spmd_tx.coordinator.sampling.request.stops import StopRule, StopWatch
from spmd_tx.coordinator.sampling.shapes import SamplingLimits, SamplingShapes
from spmd_tx.coordinator.sampling.shard import Shard
from spmd_tx.coordinator.sampling.speculation.guess import Guess, Record
from spmd_tx.coordinator.wire.sampling import ModelInput, SampleRequest

PAGE_SIZE = 4


SHAPES = SamplingShapes(shards=1, context=80, page_size=PAGE_SIZE, decode_rows=4)


@pytest.fixture
def shard():
    return Shard(SamplingLimits(SHAPES, pages_per_shard=21, decode_steps=4))


def samples_of(number, sampler, *, prompt=5, count=1):
    """Return a job's samples, with a prompt of this many tokens."""
    rule = StopRule()
    job = SampleJob(
        request_id=f"{number}",
        number=number,
        version="base",
        sampler=sampler,
        session="",
        scope=f"{number}",
        prompt=list(range(prompt)),
        max_tokens=40,
        rule=rule,
        scoring=prompt_scores.of(SampleRequest(ModelInput([])), prompt, 100, (0, 0)),
        top=0,
    )
    job.samples = [Sample(job, index, (0, 0), StopWatch(rule, None)) for index in range(count)]
    return job.samples


def test_the_sampler_with_most_samples_makes_room_youngest_first(shard):
    old, many, younger, modest = (samples_of(number, sampler) for number, sampler in enumerate("abbc"))
    for part in (old, many, younger, modest):
        shard.start(part, keep_prompt=False)
    assert shard.victim() is younger[0]
    shard.leave(younger[0])
    assert shard.victim() is modest[0]


def test_the_oldest_sample_never_makes_room(shard):
    old, young = samples_of(0, "a", prompt=40), samples_of(1, "b")
    shard.start(old, keep_prompt=False)
    assert shard.victim() is None
    shard.start(young, keep_prompt=False)
    assert shard.victim() is young[0]


def test_kept_prompts_go_before_samples_but_only_if_that_helps(shard):
    part = samples_of(0, "a", prompt=6, count=3)
    shard.start(part[:1], keep_prompt=True)
    assert not shard.drop_a_prompt(), "the sample holds all of its prompt's pages as well"
    shard.leave(part[0])
    assert shard.drop_a_prompt()
    assert shard.pool.free == 20


def test_equal_prompts_that_are_kept_for_two_requests_go_one_after_the_other(shard):
    for number in range(2):
        part = samples_of(number, "a", prompt=9, count=3)
        part[0].job.scope = "the same"
        start = shard.start(part[:1], keep_prompt=True)
        shard.remember_read(part[0], start.pages, 8)
        shard.leave(part[0])
    assert shard.pool.free == 18, "both hold the same two pages"
    assert shard.drop_a_prompt()
    assert shard.drop_a_prompt()
    assert shard.pool.free == 20
    assert not shard.drop_a_prompt()


def test_a_later_part_copies_only_the_page_that_is_filled_in_part(shard):
    part = samples_of(0, "a", prompt=7, count=3)
    first = shard.start(part[:1], keep_prompt=True)
    later = shard.start(part[1:], keep_prompt=False)
    assert (later.written, later.cached) == (6, 0)
    assert [source for source, _ in later.copies.values()] == [first.pages[1]] * 2
    assert {sample.pages[0] for sample in part} == {first.pages[0]}
    assert len({sample.pages[1] for sample in part}) == 3


def test_pages_that_another_sample_has_filled_are_found_as_long_as_nobody_wants_them(shard):
    first, second, third = (samples_of(0, "a", prompt=11) for _ in range(3))
    assert shard.start(first, keep_prompt=False).cached == 0
    pages = list(first[0].pages)
    shard.remember_read(first[0], pages, first[0].position)
    later = shard.start(second, keep_prompt=False)
    assert (later.written, later.cached, later.pages[:2]) == (8, 8, pages[:2])
    assert later.pages[2] != pages[2], "it is filled in part"
    shard.leave(first[0])
    shard.leave(second[0])
    assert shard.pool.free == 20
    assert shard.cached(third).pages == pages[:2]
    shard.pool.take(18)
    assert shard.cached(third).pages == pages[:2], "others were free"
    shard.pool.take(1)
    assert shard.cached(third).pages == pages[:1], "the last one goes first"


def test_pages_that_are_found_without_a_holder_do_not_count_twice(shard):
    shard.start(samples_of(0, "a", prompt=11), keep_prompt=False)
    shard.remember_read(shard.residents[0], shard.residents[0].pages, 10)
    shard.leave(shard.residents[0])
    shard.start(samples_of(1, "b", prompt=69), keep_prompt=False)
    assert shard.pool.free == 3
    part = samples_of(0, "a", prompt=11, count=2)
    assert shard.room_for(part, is_newcomer=True) == 1
    shard.start(part[:1], keep_prompt=False)
    assert shard.pool.free == 0


def test_room_is_left_for_what_residents_may_write_next(shard):
    shard.start(samples_of(0, "a", prompt=60), keep_prompt=False)
    assert shard.pool.free == 5
    assert shard.room_for(samples_of(1, "a", count=9), is_newcomer=False) == 3


def test_a_newcomer_may_take_what_residents_wanted_next(shard):
    shard.start(samples_of(0, "a", prompt=77), keep_prompt=False)
    assert shard.pool.free == 1
    assert shard.room_for(samples_of(1, "a"), is_newcomer=False) == 0
    assert shard.room_for(samples_of(1, "b"), is_newcomer=True) == 1


def test_more_residents_than_rows_share_them_evenly(shard):
    for part in (samples_of(0, "a", count=6), samples_of(1, "b", count=1)):
        shard.start(part, keep_prompt=False)
    chosen = shard.candidates(last_decode=0)
    assert [(sample.job.sampler, sample.index) for sample in chosen] == [
        ("a", 0),
        ("a", 1),
        ("a", 2),
        ("b", 0),
    ]


@pytest.mark.parametrize(("has_rings", "followers"), [(False, 2), (True, 3)])
def test_followers_need_slots_unless_they_share_a_ring(has_rings, followers):
    limits = SamplingLimits(SHAPES, pages_per_shard=21, decode_steps=4, state_slots=4)
    shard, (sample,) = Shard(limits, has_rings=has_rings), samples_of(0, "a")
    shard.start([sample], keep_prompt=False)
    sample.guess = Guess([1, 2, 3], 3, Record())
    shard.lend_slots([sample])
    assert sample.guess.followers == followers
