"""The experts that are kept of a sample are those of its tokens, whatever happened to it on the way."""

import msgspec
import numpy as np
import pytest
import zstandard

from spmd_tx.coordinator.sampling.cache.routing_pages import RoutingPages
from spmd_tx.coordinator.sampling.routing_notes import Routing
from spmd_tx.protocol.commands import Decode, Prefill
from tests.coordinator.sampling.bench import MAX_CONTEXT, MODEL, PAGE_SIZE, Bench, prompt_of
from tests.coordinator.sampling.fake_device import FakeDevice
from tests.support.model_shapes import resized

LAYERS, CHOICES = 2, 3


def experts_of(tokens: np.ndarray) -> np.ndarray:
    """Stand-ins that say which token they are of, and in which layer and choice."""
    numbers = np.arange(LAYERS * CHOICES).reshape(LAYERS, CHOICES)
    return ((7 * tokens[..., None, None] + numbers) % 256).astype(np.uint8)


class MixtureDevice(FakeDevice):
    """Replies the experts of every token that goes in."""

    def execute(self, command):
        first = None
        if isinstance(command, Decode):
            first = [row.token for row in self.begun(command)]
        arrays, metrics = super().execute(command)
        if isinstance(command, Prefill):
            arrays |= {"experts": experts_of(command.rows.tokens)}
        if first is not None:
            arrays |= {"experts": experts_of(np.vstack([first, arrays["tokens"][:-1]]))}
        return arrays, metrics


class MixtureBench(Bench):
    def __init__(self, **sizes):
        super().__init__(model=resized(MODEL, n_experts=8, experts_per_token=CHOICES), **sizes)
        self.device = MixtureDevice(len(self.device.rows), self.device.tokens.shape[1], PAGE_SIZE)
        self.routings = {}

    def absorb(self):
        dispatch, reply = self.in_flight[0]
        absorb = dispatch.absorb

        def kept(reply):
            ended = absorb(reply)
            self.routings |= {name: outcome.notes.get("routing") for name, outcome in ended}
            return ended

        self.in_flight[0] = (dispatch._replace(absorb=kept), reply)
        super().absorb()

    def routing(self, name: str) -> Routing:
        plain = zstandard.ZstdDecompressor().decompress(self.routings[name])
        return msgspec.msgpack.decode(plain, type=Routing)


def assert_all_kept(bench: MixtureBench, prompts: dict[str, list[int]]) -> None:
    for name, prompt in prompts.items():
        routing = bench.routing(name)
        assert len(routing.samples) == len(bench.tokens(name))
        for place, tokens in enumerate(bench.tokens(name)):
            found, length = routing.of_sample(place)
            assert length == len(prompt)
            np.testing.assert_array_equal(found, experts_of(np.array([*prompt, *tokens])[:-1]))


@pytest.mark.parametrize("length", [1, 2, PAGE_SIZE + 1, 40])
@pytest.mark.parametrize("num_samples, shards", [(1, 1), (9, 2)])
@pytest.mark.parametrize("state_slots", [0, 9])
def test_every_token_but_the_last_has_its_experts(length, num_samples, shards, state_slots):
    bench = MixtureBench(shards=shards, state_slots=state_slots)
    bench.admit("a", prompt_of(length), max_tokens=19, num_samples=num_samples, seed=5)
    bench.run()
    assert_all_kept(bench, {"a": prompt_of(length)})


def test_tokens_behind_a_stop_are_left_out():
    bench = MixtureBench()
    bench.admit("a", prompt_of(5), max_tokens=30, seed=5)
    bench.run()
    (whole,) = bench.tokens("a")
    bench.admit("b", prompt_of(5), max_tokens=30, seed=5, stop=f"<{whole[6]}><{whole[7]}>")
    bench.run()
    assert len(bench.tokens("b")[0]) == 8
    assert_all_kept(bench, {"b": prompt_of(5)})


@pytest.mark.parametrize("state_slots", [0, 33])
def test_a_sample_that_had_to_make_room_keeps_those_it_has(state_slots):
    bench = MixtureBench(rows=16, pages=MAX_CONTEXT // PAGE_SIZE + 1, state_slots=state_slots)
    prompts = {str(number): prompt_of(6 + number, number) for number in range(6)}
    for name, prompt in prompts.items():
        bench.admit(name, prompt, max_tokens=30)
    bench.run()
    starts = sum(int(((c.rows.positions == 0) & (c.rows.segments > 0)).sum()) for c in bench.sent(Prefill))
    assert starts > len(prompts), "nobody had to make room"
    assert_all_kept(bench, prompts)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_tokens_that_are_found_in_the_cache_have_theirs(batch_invariant):
    bench = MixtureBench(prefill_tokens=16, batch_invariant=batch_invariant)
    prompts = {"first": prompt_of(40), "same": prompt_of(40), "page": prompt_of(33)}
    for name, prompt in prompts.items():
        bench.admit(name, prompt, max_tokens=9, num_samples=2, seed=5)
        bench.run()
    prompts["turn"] = [*prompt_of(40), *bench.tokens("first")[0], *prompt_of(3)]
    bench.admit("turn", prompts["turn"], max_tokens=3)
    bench.run()
    assert_all_kept(bench, prompts)
    hits = {name: bench.results[name].prompt_cache_hit_tokens for name in prompts}
    read = len(prompts["turn"]) // PAGE_SIZE * PAGE_SIZE
    assert hits == (
        {"first": 0, "same": 32, "page": 32, "turn": 32}
        if batch_invariant
        else {"first": 0, "same": 36, "page": 32, "turn": read - PAGE_SIZE}
    )


def test_snapshots_of_states_are_found_with_the_experts_up_to_them():
    bench = MixtureBench(state_slots=1 + 4 + 8)
    prompts = {"first": prompt_of(39), "same": prompt_of(39), "longer": prompt_of(50)}
    for name, prompt in prompts.items():
        bench.admit(name, prompt, max_tokens=9, seed=5)
        bench.run()
    prompts["turn"] = [*prompt_of(39), *bench.tokens("first")[0], *prompt_of(3)]
    bench.admit("turn", prompts["turn"], max_tokens=3)
    bench.run()
    assert_all_kept(bench, prompts)
    hits = {name: bench.results[name].prompt_cache_hit_tokens for name in prompts}
    assert hits == {"first": 0, "same": 38, "longer": 38, "turn": 39 + 9 - 1}
    assert 38 % PAGE_SIZE, "these ends are on partly filled pages"
    assert 47 % PAGE_SIZE


@pytest.mark.parametrize("state_slots", [0, 1 + 4 + 4])
def test_pages_are_not_found_before_the_experts_of_their_tokens_are_known(state_slots):
    bench = MixtureBench(state_slots=state_slots)
    for name in "ab":
        bench.admit(name, prompt_of(40), max_tokens=3)
        bench.send()
    bench.run()
    assert [bench.results[name].prompt_cache_hit_tokens for name in "ab"] == [0, 0]
    assert_all_kept(bench, dict.fromkeys("ab", prompt_of(40)))


@pytest.mark.parametrize("state_slots", [0, 33])
def test_pages_with_new_contents_do_not_keep_the_experts_of_the_old_ones(state_slots):
    bench = MixtureBench(rows=16, pages=MAX_CONTEXT // PAGE_SIZE + 1, state_slots=state_slots)
    prompts = {str(number): prompt_of(40, number % 3) for number in range(12)}
    for name, prompt in prompts.items():
        bench.admit(name, prompt, max_tokens=9)
        bench.run(depth=1)
    assert_all_kept(bench, prompts)


def test_the_least_recently_used_pages_go_when_there_is_no_room_and_first_pages_last():
    size = 4 * LAYERS * CHOICES
    pages, experts = RoutingPages(4, 2 * size), experts_of(np.arange(12))
    pages.remember([b"a", b"b", b"c"], experts)
    assert pages.known([b"a", b"b", b"c"]) == [b"a", b"b"]
    np.testing.assert_array_equal(pages.of([b"a", b"b"]), experts[:8])
    pages.remember([b"d"], experts)
    assert pages.known([b"a", b"b"]) == [b"a"]
    pages.of([b"a"])
    pages.remember([b"e"], experts)
    assert (pages.known([b"a"]), pages.known([b"d"]), pages.known([b"e"])) == ([b"a"], [], [b"e"])
    pages.forget(b"a")
    pages.remember([b"f"], experts)
    assert pages.known([b"e", b"f"]) == [b"e", b"f"]


def test_without_experts_nothing_is_kept():
    bench = MixtureBench()
    bench.device = FakeDevice(1, bench.device.tokens.shape[1], PAGE_SIZE)
    bench.admit("a", prompt_of(5), max_tokens=3)
    bench.run()
    assert bench.routings == {"a": None}
