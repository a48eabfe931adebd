from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from spmd_tx.coordinator.runtime.slot_pool import SlotPool

CONTENTS = st.sampled_from("abcdef")


class Uses(RuleBasedStateMachine):
    """Uses a pool beside a plain list of its contents, the least recently used first."""

    @initialize(count=st.integers(1, 4), most_used=st.integers(1, 4))
    def make(self, count, most_used):
        self.most_used = min(count, most_used)
        self.pool = SlotPool(count, most_used=self.most_used)
        self.order: list[str] = []
        self.pins: list[tuple[str, int]] = []

    def pinned(self):
        return {slot for _, slot in self.pins}

    @rule(content=CONTENTS)
    def use(self, content):
        slot = self.pool.slot_of(content)
        if slot is not None:
            self.pool.touch(slot)
            self.order.remove(content)
        else:
            slot = self.pool.next_slot()
            if slot is None:
                assert len(self.pinned()) == len(self.pool), "a slot without users can be used"
                return
            leaves = self.pool.content_of(slot)
            idle = [each for each in self.order if self.pool.slot_of(each) not in self.pinned()]
            if leaves is not None:
                assert len(self.order) + len(self.forgotten()) == len(self.pool), "empty slots are used first"
                assert leaves == idle[0]
                self.remove(leaves)
            self.pool.put(content, slot)
        self.order.append(content)

    def forgotten(self):
        """Return the empty slots whose users have yet to leave."""
        return {slot for slot in self.pinned() if self.pool.content_of(slot) is None}

    @rule(content=CONTENTS)
    def remove(self, content):
        if content in self.order:
            self.pool.remove(content)
            self.order.remove(content)

    @rule(content=CONTENTS)
    def pin(self, content):
        slot = self.pool.slot_of(content)
        if slot is not None and self.pool.may_pin(slot):
            self.pool.pin(slot)
            self.pins.append((content, slot))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        pin = data.draw(st.sampled_from(self.pins))
        self.pins.remove(pin)
        self.pool.unpin(pin[1])

    @rule()
    def unpin_all(self):
        self.pins.clear()
        self.pool.unpin_all()

    @rule()
    def new_round(self):
        self.pool.new_round()

    @rule(content=CONTENTS)
    def a_new_round_lets_those_in_use_go_on(self, content):
        self.pool.new_round()
        slot = self.pool.slot_of(content)
        if slot in self.pinned() or len(self.pinned()) < self.most_used:
            assert self.pool.may_pin(slot)

    @invariant()
    def each_content_has_one_slot_and_each_slot_one_content(self):
        assert set(self.pool.contents()) == set(self.order)
        slots = [self.pool.slot_of(content) for content in self.order]
        assert len(set(slots)) == len(slots)
        assert [self.pool.content_of(slot) for slot in slots] == self.order
        held = [each for each in map(self.pool.content_of, range(len(self.pool))) if each is not None]
        assert sorted(held) == sorted(self.order)

    @invariant()
    def what_has_users_stays_unless_it_is_removed(self):
        for content, slot in self.pins:
            assert self.pool.has_users(slot)
            assert self.pool.content_of(slot) in (content, None)
        assert self.pool.next_slot() not in self.pinned()

    @invariant()
    def no_more_slots_have_users_than_may(self):
        assert len(self.pinned()) <= self.most_used


test_any_use_of_a_pool = Uses.TestCase


def filled(contents, **limits):
    pool = SlotPool(len(contents), **limits)
    for content in contents:
        pool.put(content, pool.next_slot())
    return pool


def test_who_claims_least_leaves_first_and_of_equals_the_least_recently_used():
    pool = filled("abc")
    pool.touch(pool.slot_of("a"))
    assert pool.content_of(pool.next_slot()) == "b"
    assert pool.content_of(pool.next_slot({"a": 0, "b": 2, "c": 1}.get)) == "a"
    assert pool.content_of(pool.next_slot({"a": 1, "b": None, "c": 1}.get)) == "c"
    assert pool.next_slot(lambda content: None) is None


def test_a_turn_lasts_until_it_is_spent():
    pool = SlotPool(1)
    pool.put("a", 0, turn=100)
    pool.spend(0, 99)
    assert pool.has_turn(0)
    pool.spend(0, 50)
    assert not pool.has_turn(0)
    pool.remove("a")
    pool.put("b", 0, turn=100)
    assert pool.has_turn(0)


def test_the_one_used_for_longest_gets_no_new_users_while_another_one_waits():
    pool = filled("abc", most_used=2)
    for content in "ba":
        pool.pin(pool.slot_of(content))
    a, b, c = map(pool.slot_of, "abc")
    assert pool.may_pin(a)
    assert not pool.may_pin(c)
    assert not pool.may_pin(b)
    assert pool.may_pin(a)
    pool.unpin(b)
    assert pool.may_pin(c)
    assert not pool.may_pin(b)
    pool.new_round()
    assert pool.may_pin(b)


def test_slots_that_are_not_shared_take_nobodys_turn():
    pool = filled("abc", shared=(1, 2), most_used=1)
    pool.pin(0)
    assert pool.may_pin(1)
    pool.pin(1)
    assert not pool.may_pin(2)
    assert pool.may_pin(0)
    assert not pool.may_pin(1)
