"""With a model that keeps states, every row reads exactly its own tokens, and prefixes start at snapshots."""

import pytest
from hypothesis import settings

from spmd_tx.protocol.commands import Decode, Prefill
from tests.coordinator.sampling.bench import (
    MAX_CONTEXT,
    MODEL,
    PAGE_SIZE,
    Bench,
    expected,
    free_slots,
    prompt_of,
)
from tests.coordinator.sampling.cache.test_prefix_cache import Conversations, written
from tests.support.model_shapes import resized

SLOTS = 1 + 4 + 4


@pytest.fixture
def bench():
    return Bench(state_slots=SLOTS)


def test_rows_have_one_segment_and_leave_their_states_in_slots(bench):
    for number in range(3):
        bench.admit(f"{number}", prompt_of(9, number), max_tokens=5, seed=number)
    bench.run()
    for number in range(3):
        assert bench.tokens(f"{number}") == [expected("", prompt_of(9, number), 5, seed=number)[0]]
    (prefill,) = bench.sent(Prefill)
    assert prefill.rows.segments.max() == 1
    assert sorted(prefill.states.targets[:3]) == [1, 3, 5], "each prompt's end has the slot between"
    assert free_slots(bench) == [SLOTS - 1]


def test_the_same_prompt_is_read_once_with_its_last_page():
    bench, prompt = Bench(state_slots=SLOTS), prompt_of(2 * PAGE_SIZE + 3)
    for name in ("a", "b"):
        bench.admit(name, prompt, max_tokens=9, seed=4)
        bench.run()
    assert bench.tokens("a") == bench.tokens("b") == [expected("", prompt, 9, seed=4)[0]]
    assert bench.hits("b") == len(prompt) - 1
    assert written(bench) == len(prompt) - 1


@pytest.mark.parametrize("count", [1, 3, 7])
def test_a_conversation_goes_on_from_the_end_of_what_was_sampled(bench, count):
    prompt, found, ends = prompt_of(6), [], [0]
    for turn in range(4):
        bench.admit(f"{turn}", prompt, max_tokens=count, seed=turn)
        bench.run()
        (answer,) = bench.tokens(f"{turn}")
        assert answer == expected("", prompt, count, seed=turn)[0]
        found.append(bench.hits(f"{turn}"))
        ends.append(len(prompt) + count - 1)
        prompt = [*prompt, *answer, *prompt_of(3, turn)]
    assert found == ends[:-1], "up to the last token of the answer before"


@pytest.mark.parametrize("length", [1, 2, PAGE_SIZE + 1, 2 * PAGE_SIZE + 3])
@pytest.mark.parametrize("num_samples", [4, 11])
def test_samples_of_one_prompt_start_from_copies_of_its_state(length, num_samples):
    bench, prompt = Bench(state_slots=SLOTS), prompt_of(length)
    bench.admit("a", prompt, max_tokens=10, num_samples=num_samples)
    bench.run()
    assert bench.tokens("a") == [expected("a", prompt, 10, index=index)[0] for index in range(num_samples)]
    assert written(bench) == length - 1
    assert free_slots(bench) == [SLOTS - 1]


def test_a_model_with_experts_reads_a_prompt_once_for_samples_that_start_later():
    moe = resized(MODEL, n_experts=4, experts_per_token=2, normalize_expert_weights=True)
    bench, prompt = Bench(state_slots=1 + 4 + 2, model=moe), prompt_of(2 * PAGE_SIZE + 3)
    bench.admit("a", prompt, max_tokens=10, num_samples=7)
    bench.run()
    assert bench.tokens("a") == [expected("a", prompt, 10, index=index)[0] for index in range(7)]
    assert written(bench) == len(prompt) - 1
    assert free_slots(bench) == [6]


def test_a_stop_token_of_the_device_leaves_a_state_but_a_stop_string_does_not(bench):
    prompt = prompt_of(6)
    whole, _ = expected("", prompt, 30, seed=1)
    stops = {"token": [whole[4]], "string": f"{whole[4]}><{whole[5]}"}
    for name, stop in stops.items():
        bench.admit(name, prompt, max_tokens=30, seed=1, stop=stop, sampler=f"{name}:sample:0")
        bench.run()
        (answer,) = bench.tokens(name)
        bench.admit(f"after {name}", [*prompt, *answer, 1, 2], max_tokens=3, sampler=f"{name}:sample:0")
        bench.run()
    ends = len(prompt) + whole.index(whole[4]), len(prompt) - 1
    assert (bench.hits("after token"), bench.hits("after string")) == ends


@pytest.mark.parametrize("on_cpu", [False, True])
def test_samples_that_made_room_continue_from_their_own_states(on_cpu):
    pages = MAX_CONTEXT // PAGE_SIZE + 4
    bench = Bench(pages=pages, state_slots=SLOTS, on_cpu=on_cpu)
    for number in range(4):
        bench.admit(f"{number}", prompt_of(9, number), max_tokens=40, seed=number)
    bench.run()
    for number in range(4):
        assert bench.tokens(f"{number}") == [expected("", prompt_of(9, number), 40, seed=number)[0]]
    assert any(command.states.copies_before.any() for command in bench.sent(Prefill)), "nobody did"
    assert free_slots(bench) == [SLOTS - 1]


def test_long_prompts_are_read_in_parts_beside_others():
    bench = Bench(prefill_tokens=16, state_slots=SLOTS, rows=4)
    for number, length in enumerate((50, 20, 33, 50, 5)):
        bench.admit(f"{number}", prompt_of(length, number % 4), max_tokens=9, num_samples=2, seed=number)
    bench.run()
    for number, length in enumerate((50, 20, 33, 50, 5)):
        wanted = [
            expected("", prompt_of(length, number % 4), 9, seed=number, index=index)[0] for index in range(2)
        ]
        assert bench.tokens(f"{number}") == wanted
    assert free_slots(bench) == [SLOTS - 1]


def test_without_slots_for_snapshots_rows_wait_for_their_states_only():
    bench = Bench(state_slots=1 + 4)
    for number in range(9):
        bench.admit(f"{number}", prompt_of(7, number), max_tokens=6, num_samples=2, seed=number)
    bench.run()
    for number in range(9):
        wanted = [expected("", prompt_of(7, number), 6, seed=number, index=index)[0] for index in range(2)]
        assert bench.tokens(f"{number}") == wanted
    assert free_slots(bench) == [4]


def test_a_batch_invariant_model_with_states_reads_every_prompt_from_its_start():
    bench = Bench(state_slots=SLOTS, batch_invariant=True, exact=False)
    for name in ("a", "b"):
        bench.admit(name, prompt_of(30), max_tokens=9, seed=4)
        bench.run()
    assert bench.tokens("a") == bench.tokens("b") == [expected("", prompt_of(30), 9, seed=4)[0]]
    assert bench.hits("b") == 0


def test_models_without_states_have_none_in_their_commands():
    bench = Bench()
    bench.admit("a", prompt_of(9), max_tokens=5)
    bench.run()
    assert {each.states for kind in (Prefill, Decode) for each in bench.sent(kind)} == {None}


class ConversationsWithStates(Conversations):
    """The same with a state of every sequence, in few slots."""

    state_slots = 1 + 3 + 2

    def teardown(self):
        super().teardown()
        assert free_slots(self.bench) == [self.state_slots - 1] * 2


class WithStatesOnCpu(ConversationsWithStates):
    """The same where a Prefill runs row by row."""

    on_cpu = True


for machine in (ConversationsWithStates, WithStatesOnCpu):
    machine.TestCase.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
TestConversationsWithStates, TestWithStatesOnCpu = ConversationsWithStates.TestCase, WithStatesOnCpu.TestCase
