"""A row that starts from a snapshot has read exactly the tokens that the snapshot stands for."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from spmd_tx.coordinator.sampling.cache.pages import BlockKeys, PrefixCache, pages_for
from spmd_tx.coordinator.sampling.cache.state_slots import (
    INTERVAL,
    NOTHING,
    Prefix,
    StateCache,
    ends_on_device,
    is_due,
    prefix_of,
)

PAGE_SIZE = 4
SCOPE = "a"


def keys_of(content, scope=SCOPE):
    return BlockKeys(scope, PAGE_SIZE).first(len(content) // PAGE_SIZE, content)


def place_of(content, scope=SCOPE):
    return prefix_of(scope, keys_of(content, scope), content, PAGE_SIZE)


def cache_with(*contents):
    """Return a prefix cache that remembers the pages of these contents."""
    cache = PrefixCache(50)
    for content in contents:
        pages = cache.pool.take(pages_for(len(content), PAGE_SIZE))
        remember(cache, content, pages)
        cache.pool.release(pages)
    return cache


def remember(cache, content, pages):
    keys = keys_of(content)
    if len(content) % PAGE_SIZE:
        keys = [*keys, place_of(content).key]
    cache.remember(keys, pages)


def find(slots, cache, content, scope=SCOPE):
    return slots.find(cache, scope, keys_of(content, scope), content, PAGE_SIZE)


def test_a_hit_is_cut_back_to_the_last_snapshot():
    ten, four = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2, 3, 4]
    cache, slots = cache_with(ten), StateCache(6)
    first, second = slots.take(2)
    slots.keep(first, place_of(four))
    slots.keep(second, place_of(ten))
    assert (find(slots, cache, [*ten, 11]).length, find(slots, cache, [*ten, 11]).slot) == (10, second)
    assert len(find(slots, cache, ten).pages) == 3
    assert (find(slots, cache, [*ten[:9], 0, 0, 0]).length, find(slots, cache, ten[:9]).slot) == (4, first)
    assert find(slots, cache, [1, 2, 3, 0]) is None
    assert find(slots, cache, ten, scope="b") is None


def test_a_snapshot_goes_with_the_page_that_it_hangs_on():
    slots, content = StateCache(3), [1, 2, 3, 4, 5]
    (slot,) = slots.take(1)
    slots.keep(slot, place_of(content))
    assert find(slots, cache_with(content[:4]), content) is None
    slots.forget(place_of(content).key)
    assert find(slots, cache_with(content), content) is None
    assert slots.free == 2


def test_the_least_recently_used_snapshot_makes_room_for_a_row():
    contents = [[number] * 4 for number in range(3)]
    cache, slots = cache_with(*contents), StateCache(4)
    for slot, content in zip(slots.take(3), contents, strict=True):
        slots.keep(slot, place_of(content))
    assert find(slots, cache, contents[0]) is not None
    slots.take(2)
    assert [find(slots, cache, content) is not None for content in contents] == [True, False, False]


def test_a_copy_is_found_only_after_the_command_that_makes_it():
    content, slots = [1, 2, 3, 4], StateCache(4)
    cache = cache_with(content)
    assert slots.plan_copy(place_of(content)) is not None
    assert slots.plan_copy(place_of(content)) is None
    assert find(slots, cache, content) is None
    assert slots.free == 2  # its slot is written by the command, so no row may have it before
    slots.sent()
    assert find(slots, cache, content).length == 4
    assert slots.free == 3


def test_a_slot_that_a_command_still_writes_is_not_lent_before_it_is_sent():
    content, slots = [1, 2, 3, 4], StateCache(3)
    assert slots.plan_copy(place_of(content)) is not None
    slots.forget(place_of(content).key)
    assert slots.free == 1
    slots.sent()
    assert slots.free == 2
    assert find(slots, cache_with(content), content) is None


@pytest.mark.parametrize(
    "stop_reason, last, expected",
    [("length", 7, True), ("stop", 5, True), ("stop", 7, False), (None, 5, False)],
)
def test_only_what_the_device_ended_leaves_a_state_without_foreign_tokens(stop_reason, last, expected):
    assert ends_on_device(stop_reason, last, [5, 6]) is expected


def test_snapshots_are_due_at_the_end_and_at_intervals():
    assert [at for at in range(0, 2 * INTERVAL + 10) if is_due(at, INTERVAL + 5)] == [1024, 1029, 2048]
    assert not is_due(0, 0)


@dataclass(eq=False)
class Row:
    slot: int
    pages: list[int]
    read: list[int] = field(default_factory=list)


class Device(RuleBasedStateMachine):
    """Rows start, read and end in any order beside a device that knows what each slot and page holds."""

    SLOTS, PAGES = 6, 16

    def __init__(self):
        super().__init__()
        self.slots = StateCache(self.SLOTS)
        self.cache = PrefixCache(self.PAGES, self.slots.forget)
        self.rows: list[Row] = []
        self.states = {NOTHING: []}  # what each slot has read
        self.paged = {}  # the tokens on each page

    @rule(prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=11), min_size=1, max_size=3))
    def start_in_one_command(self, prompts):
        reads, copies, borrowed = [], [], []
        for prompt in prompts:
            hit = find(self.slots, self.cache, prompt)
            found = hit.pages if hit else []
            self.cache.pool.hold(found)
            borrowed += found
            full = hit.length // PAGE_SIZE if hit else 0
            wanted = pages_for(len(prompt), PAGE_SIZE) - full
            if self.slots.free < 1 or self.cache.pool.free < wanted + 1:
                continue
            self.cache.pool.hold(found[:full])
            row = Row(self.slots.take(1)[0], found[:full] + self.cache.pool.take(wanted), list(prompt))
            reads.append((hit.slot if hit else NOTHING, hit.length if hit else 0, row))
            if hit and hit.length % PAGE_SIZE:
                self.paged[row.pages[full]] = list(self.paged[found[full]])
            self.rows.append(row)
            copies += self.snapshot(row)
        before = [(list(self.states[source]), length, row) for source, length, row in reads]
        for read, length, row in before:
            assert read == row.read[:length]
            self.write(row, length)
        for row, slot in copies:
            self.states[slot] = list(self.states[row.slot])
        self.cache.pool.release(borrowed)
        self.slots.sent()

    def write(self, row, first):
        self.states[row.slot] = list(row.read)
        for position in range(first, len(row.read)):
            page, at = row.pages[position // PAGE_SIZE], position % PAGE_SIZE
            assert at == 0 or len(self.paged[page]) >= at
            self.paged[page] = [*(self.paged[page][:at] if at else []), row.read[position]]

    def snapshot(self, row):
        """Copy the state, and a partly filled last page, to be found later."""
        where, tail = place_of(row.read), len(row.read) % PAGE_SIZE
        if tail and not self.cache.pool.free:
            return []
        full = len(row.read) // PAGE_SIZE
        self.cache.remember(keys_of(row.read), row.pages[:full])
        if tail and not self.cache.find([where.key]):
            (page,) = self.cache.pool.take(1)
            self.cache.remember([where.key], [page])
            self.paged[page] = row.read[full * PAGE_SIZE :]
            self.cache.pool.release([page])
        slot = self.slots.plan_copy(where)
        return [] if slot is None else [(row, slot)]

    @precondition(lambda self: self.rows)
    @rule(number=st.integers(0, 20), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def decode(self, number, tokens):
        row = self.rows[number % len(self.rows)]
        wanted = pages_for(len(row.read) + len(tokens), PAGE_SIZE) - len(row.pages)
        if wanted <= self.cache.pool.free:
            row.pages += self.cache.pool.take(wanted)
            first = len(row.read)
            row.read += tokens
            self.write(row, first)

    @precondition(lambda self: self.rows)
    @rule(number=st.integers(0, 20), is_clean=st.booleans())
    def end(self, number, is_clean):
        row = self.rows.pop(number % len(self.rows))
        if is_clean:
            remember(self.cache, row.read, row.pages)
            self.slots.keep(row.slot, place_of(row.read))
        else:  # its state has read tokens that are not part of the text
            self.slots.release([row.slot])
        self.cache.pool.release(row.pages)

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=11))
    def a_hit_holds_the_tokens(self, prompt):
        hit = find(self.slots, self.cache, prompt)
        if hit is not None:
            assert 0 < hit.length <= len(prompt)
            assert self.states[hit.slot] == prompt[: hit.length]
            held = [token for page in hit.pages for token in self.paged[page]]
            assert held[: hit.length] == prompt[: hit.length]

    @invariant()
    def rows_have_slots_and_states_of_their_own(self):
        used = [row.slot for row in self.rows]
        assert len(set(used)) == len(used)
        assert NOTHING not in used
        assert self.slots.free == self.SLOTS - 1 - len(used)
        assert all(self.states[row.slot] == row.read for row in self.rows)


Device.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestDevice = Device.TestCase


def test_places_of_different_contents_have_different_keys():
    places = [place_of([1, 2, 3, 4]), place_of([1, 2, 3]), place_of([1, 2, 3], "b"), Prefix(b"", (1, 2, 3))]
    assert len({each.key for each in places}) == 4
