"""Cached pages outlive their samples: they are found by their contents, and free for whoever needs them."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from spmd_tx.coordinator.sampling.bank import BASE_MODEL
from spmd_tx.coordinator.sampling.cache.pages import BlockKeys, PrefixCache
from spmd_tx.protocol.commands import AdapterSpec, Prefill
from tests.coordinator.sampling.bench import MAX_CONTEXT, PAGE_SIZE, Bench, expected, free_pages, prompt_of
from tests.coordinator.sampling.fake_device import BASE, score

PAGES = 9


def written(bench):
    """Return how many prompt tokens were sent to the device."""
    return sum(int((command.rows.segments > 0).sum()) for command in bench.sent(Prefill))


def test_a_key_depends_on_scope_and_all_tokens_before():
    tokens = list(range(12))
    keys = [
        tuple(BlockKeys(scope, PAGE_SIZE).first(3, text))
        for scope, text in [("a", tokens), ("b", tokens), ("a", [1, *tokens[1:]]), ("a", [*tokens[:11], 0])]
    ]
    assert len({key[0] for key in keys}) == 3
    assert len({key[2] for key in keys}) == 4
    grown = BlockKeys("a", PAGE_SIZE)
    assert grown.first(1, tokens[:5]) == list(keys[0][:1])
    assert grown.first(3, tokens) == list(keys[0])


@pytest.mark.parametrize("length", [PAGE_SIZE, PAGE_SIZE + 1, 4 * PAGE_SIZE, 4 * PAGE_SIZE + 3])
def test_the_same_prompt_is_read_once(length):
    prompt, bench = prompt_of(length), Bench()
    for name in ("a", "b"):
        bench.admit(name, prompt, max_tokens=9, seed=4)
        bench.run()
    full = (length - 1) // PAGE_SIZE * PAGE_SIZE
    assert bench.tokens("a") == bench.tokens("b") == [expected("", prompt, 9, seed=4)[0]]
    assert (bench.hits("a"), bench.hits("b")) == (0, full)
    assert written(bench) == 2 * (length - 1) - full


def test_a_conversation_is_read_once_with_what_was_sampled():
    bench, prompt = Bench(), prompt_of(6)
    for turn in range(3):
        bench.admit(f"{turn}", prompt, max_tokens=7, seed=turn, stop=[])
        bench.run()
        (answer,) = bench.tokens(f"{turn}")
        assert answer == expected("", prompt, 7, seed=turn)[0]
        prompt = [*prompt, *answer, *prompt_of(3, turn)]
    # Of 6 and 7 tokens the keys and values of 12 are there, of 16 and 7 those of 22.
    assert [bench.hits(f"{turn}") for turn in range(3)] == [0, 12, 20]
    assert written(bench) == 5 + (16 - 1 - 12) + (26 - 1 - 20)


def test_pages_are_found_while_the_first_sample_still_runs_and_by_a_group_of_samples():
    bench, prompt = Bench(rows=8), prompt_of(4 * PAGE_SIZE + 2)
    bench.admit("long", prompt, max_tokens=30, seed=1)
    bench.send()
    bench.admit("group", prompt, max_tokens=5, seed=2, num_samples=5)
    bench.run()
    assert bench.hits("group") == 4 * PAGE_SIZE
    assert bench.tokens("group") == [expected("", prompt, 5, seed=2, index=index)[0] for index in range(5)]
    assert bench.tokens("long") == [expected("", prompt, 30, seed=1)[0]]


def test_only_what_is_not_scored_is_taken_from_the_cache():
    bench, prompt = Bench(), prompt_of(4 * PAGE_SIZE + 2)
    options = {"max_tokens": 2, "prompt_logprobs": True}
    bench.admit("a", prompt, max_tokens=2)
    bench.run()
    bench.admit("whole", prompt, **options)
    bench.admit("some", prompt, prompt_logprobs_last_n=6, topk_prompt_logprobs=1, **options)
    bench.run()
    assert (bench.hits("whole"), bench.hits("some")) == (0, 2 * PAGE_SIZE)
    wanted = [score(BASE, prompt[:place], prompt[place]) for place in range(1, len(prompt))]
    assert bench.prompt_logprobs("whole")[1:] == wanted
    assert bench.prompt_logprobs("some")[-6:] == wanted[-6:]


def test_nothing_is_shared_between_versions_sessions_or_weights_of_one_name():
    bench, prompt = Bench(), prompt_of(3 * PAGE_SIZE)
    bench.register("v1")
    asked = [
        ("a", BASE_MODEL, "s1:sample:0", 0),
        ("b", BASE_MODEL, "s2:sample:0", 0),
        ("c", "v1", "s1:sample:1", 0),
        ("d", BASE_MODEL, "s1:sample:2", 2 * PAGE_SIZE),
        ("e", "v1", "s1:sample:1", 2 * PAGE_SIZE),
    ]
    for name, version, sampler, hits in asked:
        bench.admit(name, prompt, version, max_tokens=2, sampler=sampler)
        bench.run()
        assert bench.hits(name) == hits, name
    bench.bank.forget("v1")
    bench.bank.register("v1", AdapterSpec(rank=4), "v1, saved again")
    bench.admit("f", prompt, "v1", max_tokens=9, seed=3, sampler="s1:sample:1")
    bench.run()
    assert bench.hits("f") == 0
    assert bench.tokens("f") == [expected("", prompt, 9, seed=3, version="v1, saved again")[0]]


def test_a_sample_that_made_room_finds_its_own_pages_again_if_they_were_not_taken():
    bench = Bench(pages=MAX_CONTEXT // PAGE_SIZE + 4)
    for number in range(4):
        bench.admit(f"{number}", prompt_of(9, number), max_tokens=40, seed=number)
    bench.run()
    for number in range(4):
        assert bench.tokens(f"{number}") == [expected("", prompt_of(9, number), 40, seed=number)[0]]


def test_prompts_that_go_on_do_not_share_a_row_and_stay_small_enough():
    bench = Bench(rows=16, pages=300, prefill_tokens=256)
    stems = [prompt_of(3 * PAGE_SIZE + 1, offset) for offset in range(8)]
    for number, stem in enumerate(stems):
        bench.admit(f"stem {number}", stem, max_tokens=1)
    bench.run()
    before = len(bench.sent(Prefill))
    for number, stem in enumerate(stems):
        bench.admit(f"{number}", [*stem, 1, 2, 3], max_tokens=5, seed=number)
    bench.run()
    for number, stem in enumerate(stems):
        assert bench.tokens(f"{number}") == [expected("", [*stem, 1, 2, 3], 5, seed=number)[0]]
        assert bench.hits(f"{number}") == 3 * PAGE_SIZE
    for command in bench.sent(Prefill)[before:]:
        assert command.tables is not None
        assert command.rows.tokens.size <= 256


class Pages(RuleBasedStateMachine):
    """Holders come and go in any order; a page that is found holds what it was remembered for."""

    def __init__(self):
        super().__init__()
        self.cache = PrefixCache(PAGES)
        self.held = []  # lists of pages
        self.contents = {}  # of pages, as the device has them

    @rule(text=st.text("ab", min_size=1, max_size=5))
    def start(self, text):
        keys = [text[: end + 1].encode() for end in range(len(text))]
        found = self.cache.find(keys)
        for key, page in zip(keys, found, strict=False):
            assert self.contents[page] == key
        needed = len(keys) - len(found)
        if needed + sum(not self.cache.pool.is_held(page) for page in found) > self.cache.pool.free:
            return
        self.cache.pool.hold(found)
        taken = self.cache.pool.take(needed)
        assert not set(taken) & {page for pages in self.held for page in pages}
        self.contents |= dict(zip(taken, keys[len(found) :], strict=True))
        self.cache.remember(keys, found + taken)
        self.held.append(found + taken)

    @precondition(lambda self: self.held)
    @rule(choice=st.randoms())
    def leave(self, choice):
        self.cache.pool.release(self.held.pop(choice.randrange(len(self.held))))

    @rule(count=st.integers(1, 3))
    def take(self, count):
        if count <= self.cache.pool.free:
            taken = self.cache.pool.take(count)
            self.contents |= dict.fromkeys(taken, b"other")
            self.held.append(taken)

    @rule(text=st.text("ab", min_size=1, max_size=3), wanted=st.integers(0, 3))
    def learn_late_what_pages_hold(self, text, wanted):
        """They are free by then, and perhaps somebody else's already."""
        if len(text) > self.cache.pool.free:
            return
        pages = self.cache.pool.take(len(text))
        keys = [text[: end + 1].encode() for end in range(len(text))]
        self.contents |= dict(zip(pages, keys, strict=True))
        left = [(page, self.cache.pool.takes(page)) for page in pages]
        self.cache.pool.release(pages)
        self.take(min(wanted, self.cache.pool.free))
        self.cache.recall(keys, left)

    @invariant()
    def every_page_is_held_or_free(self):
        held = {page for pages in self.held for page in pages}
        assert self.cache.pool.free == PAGES - 1 - len(held)

    def teardown(self):
        for pages in self.held:
            self.cache.pool.release(pages)
        assert sorted(self.cache.pool.take(PAGES - 1)) == list(range(1, PAGES))
        assert self.cache.find([b"a"]) == self.cache.find([b"b"]) == []


Pages.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPages = Pages.TestCase


class Conversations(RuleBasedStateMachine):
    """Texts that share beginnings, in little room; tokens stay what they must be, and no page is lost."""

    on_cpu, state_slots = False, 0

    def __init__(self):
        super().__init__()
        pages = MAX_CONTEXT // PAGE_SIZE + 4
        self.bench = Bench(shards=2, rows=3, pages=pages, on_cpu=self.on_cpu, state_slots=self.state_slots)
        self.bench.register("v1")
        self.wanted = {}

    @rule(
        stem=st.integers(0, 1),
        length=st.integers(1, 40),
        count=st.integers(1, 20),
        num_samples=st.integers(1, 4),
        version=st.sampled_from([BASE_MODEL, "v1"]),
        last=st.sampled_from([None, 1, 3]),
    )
    def admit(self, stem, length, count, num_samples, version, last):
        name, prompt = f"request {len(self.wanted)}", prompt_of(length, stem)
        options = {"max_tokens": count, "num_samples": num_samples, "stop": [], "sampler": version}
        if last is not None and last < length:
            options |= {"prompt_logprobs": True, "prompt_logprobs_last_n": last}
        self.bench.admit(name, prompt, version, **options)
        self.wanted[name] = [
            expected(name, prompt, count, index=index, version=version)[0] for index in range(num_samples)
        ]

    @rule()
    def send(self):
        self.bench.send()

    @precondition(lambda self: self.bench.in_flight)
    @rule()
    def absorb(self):
        self.bench.absorb()

    @precondition(lambda self: self.wanted.keys() - self.bench.results.keys())
    @rule(choice=st.randoms())
    def cancel(self, choice):
        name = choice.choice(sorted(self.wanted.keys() - self.bench.results.keys()))
        self.bench.batch.cancel(name)
        del self.wanted[name]
        self.wanted[f"{name}, cancelled"] = None
        self.bench.results[f"{name}, cancelled"] = None

    def teardown(self):
        self.bench.run()
        for name, wanted in self.wanted.items():
            assert wanted is None or self.bench.tokens(name) == wanted
        assert free_pages(self.bench) == [MAX_CONTEXT // PAGE_SIZE + 3] * 2


class ConversationsOnCpu(Conversations):
    """The same where a Prefill runs row by row and all tables have one width."""

    on_cpu = True


for machine in (Conversations, ConversationsOnCpu):
    machine.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestConversations, TestConversationsOnCpu = Conversations.TestCase, ConversationsOnCpu.TestCase
