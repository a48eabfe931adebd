from itertools import pairwise

from spmd_tx.protocol.commands import Decode, Prefill
from tests.coordinator.sampling.bench import MAX_CONTEXT, PAGE_SIZE, Bench, expected, prompt_of

FULL_CONTEXT = MAX_CONTEXT // PAGE_SIZE + 1  # pages: one sample of the whole context, and the trash page


def test_samplers_take_turns():
    bench = Bench(rows=8, prefill_tokens=64, pages=200)
    for number in range(6):
        bench.admit(f"many {number}", prompt_of(50), max_tokens=14, sampler="many")
    for number in range(2):
        bench.admit(f"few {number}", prompt_of(50), max_tokens=14, sampler="few")
    assert list(bench.run())[:4] == ["many 0", "few 0", "many 1", "few 1"]


def test_requests_of_one_sampler_are_served_in_order():
    bench = Bench(rows=2)
    names = [f"{number}" for number in range(7)]
    for name in names:
        bench.admit(name, prompt_of(3), max_tokens=8, num_samples=2)
    assert list(bench.run()) == names


def test_a_huge_request_does_not_block_another_sampler():
    bench = Bench(rows=4)
    bench.admit("huge", prompt_of(3), max_tokens=60, num_samples=40, sampler="greedy")
    for _ in range(3):
        bench.send()
    bench.admit("small", prompt_of(3), max_tokens=4, sampler="modest")
    while "small" not in bench.results:
        while bench.send():
            pass
        bench.absorb()
    assert len(bench.sent(Decode)) <= 5
    bench.run()
    assert bench.tokens("huge") == [expected("huge", prompt_of(3), 60, index=index)[0] for index in range(40)]


def test_a_request_with_more_samples_than_rows_lets_others_of_its_sampler_pass():
    bench = Bench(rows=4)
    bench.admit("huge", prompt_of(3), max_tokens=8, num_samples=40)
    bench.admit("small", prompt_of(3), max_tokens=4)
    assert list(bench.run()) == ["small", "huge"]


def test_a_request_that_needs_many_pages_is_not_passed_over_for_ever():
    bench = Bench(rows=8, pages=FULL_CONTEXT, decode_steps=4)
    for number in range(300):
        bench.admit(f"{number}", prompt_of(3, number), max_tokens=2 + number * 7 % 12, sampler="many")
    for _ in range(3):
        bench.send()
    bench.admit("big", prompt_of(60), max_tokens=4, sampler="one")
    assert list(bench.run()).index("big") < 100


def test_running_rows_get_their_turn_between_two_prefills():
    bench = Bench(rows=16, prefill_tokens=64, pages=100)
    for number in range(5):
        bench.admit(f"{number}", prompt_of(50, number), max_tokens=14)
    bench.run()
    kinds = [type(command) for command in bench.commands]
    assert (Prefill, Prefill) not in pairwise(kinds)


def test_prompts_that_could_start_wait_for_short_decodes_only():
    bench = Bench(rows=16, prefill_tokens=64, pages=100, decode_steps=16)
    for number in range(3):
        bench.admit(f"{number}", prompt_of(50, number), max_tokens=14)
    bench.run()
    assert [command.steps for command in bench.sent(Decode)[:3]] == [4, 4, 6]


def test_a_waiting_request_says_what_it_waits_for():
    bench = Bench(rows=4)
    bench.admit("running", prompt_of(9), max_tokens=50, num_samples=4)
    bench.admit("waiting", prompt_of(9), max_tokens=50)
    while bench.send():
        pass
    assert bench.batch.status("running") is None
    assert "free row" in bench.batch.status("waiting")
    bench.admit("last", prompt_of(5), num_samples=2, max_tokens=4)
    assert bench.batch.status("last").startswith("1 sample ahead; waiting for")
    bench.batch.cancel("waiting")
    assert "ahead" not in bench.batch.status("last")
    assert bench.batch.status("unknown") is None
    bench.run()


def test_a_request_without_room_in_the_cache_says_so():
    bench = Bench(rows=4, pages=FULL_CONTEXT)
    bench.admit("running", prompt_of(50), max_tokens=14)
    bench.admit("waiting", prompt_of(50, 1), max_tokens=14)
    while bench.send():
        pass
    assert "key-value cache" in bench.batch.status("waiting")


def test_a_request_whose_weights_find_no_slot_says_so():
    bench = Bench(rows=4, slots=3)
    for version in ("v1", "v2"):
        bench.register(version)
        bench.admit(version, prompt_of(9), version, max_tokens=50)
    while bench.send():
        pass
    assert "sampler slot" in bench.batch.status("v2")
