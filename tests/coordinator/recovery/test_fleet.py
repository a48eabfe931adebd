"""Groups that sample what another one trains: they join, leave and are lost, and no answer changes."""

import asyncio
import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from spmd_tx.coordinator.groups import routing
from spmd_tx.coordinator.requests.records import Failed
from spmd_tx.coordinator.runtime import metrics
from spmd_tx.coordinator.scheduler.command_seconds import CommandSeconds
from tests.coordinator.recovery.bench import SimulatedGroup, lost
from tests.coordinator.recovery.oracle import Asked
from tests.coordinator.recovery.test_state_machine import (
    ANY,
    CLIENTS,
    FAST,
    MOST_GENERATIONS,
    Crashes,
)

SAMPLERS = 3
QUIET_TURNS = 100  # of the event loop; what it does without threads takes fewer


class Fleet(Crashes):
    """Clients of a base model that one group trains and several sample."""

    samplers = SAMPLERS

    @precondition(lambda self: self.losses < MOST_GENERATIONS)
    @rule(which=ANY, comes_back=ANY)
    def lose_a_sampler(self, which, comes_back):
        self.losses += 1
        group = self.sampler(which)
        if comes_back % 3 == 0:
            self.wait_for(self.drain(group))
        if comes_back % 2:
            group.leave()
        group.workers.lose(lost(), executed=comes_back % 3)
        self.wait_for(self.settle())

    @rule(which=ANY)
    def let_a_sampler_join(self, which):
        self.sampler(which).join()
        self.wait_for(self.settle())

    async def drain(self, group: SimulatedGroup) -> None:
        """Announce that a group leaves that has work: what has begun may go on for a while."""
        if not group.workers.pending:
            return
        group.is_ready = False
        self.coordinator.beside.leaves(group)
        await self.settle()
        group.workers.finish(min(2, len(group.workers.pending) - 1))
        await self.settle()

    def sampler(self, which: int) -> SimulatedGroup:
        return self.coordinator.groups[1 + which % SAMPLERS]

    async def end_well(self) -> None:
        await super().end_well()
        for client in self.clients:
            if not client.has_ended:
                client.has_ended = True
                await self.finish_session(client.session_id)
        await self.work_off(rounds=5)
        await self.coordinator.beside.store.close()
        assert list((self.folder / "versions").iterdir()) == []


class PatientFleet(Fleet):
    """Has nothing under way when the next thing happens."""

    async def begin(self) -> None:
        """Count what the event loop has given to threads, and has not heard of yet."""
        self.in_threads, give = 0, self.loop.run_in_executor

        def counted(*arguments: Any) -> Any:
            self.in_threads += 1
            future = give(*arguments)
            future.add_done_callback(self.come_back)
            return future

        self.loop.run_in_executor = counted  # pyright: ignore[reportAttributeAccessIssue]
        await super().begin()

    def come_back(self, _: object) -> None:
        self.in_threads -= 1

    async def settle(self, turns: int = QUIET_TURNS) -> None:
        """Wait, however long it takes, until only the workers or the test could go on."""
        quiet = 0
        while quiet < turns:
            is_at_work = self.in_threads > 0 or self.coordinator.uses_its_database
            quiet = 0 if is_at_work else quiet + 1
            await asyncio.sleep(0.001 if is_at_work else 0)


@pytest.mark.parametrize("most", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_no_answer_changes_through_many_joins_leavings_and_losses_of_samplers(most):
    """The group that trains notices none of them, and everybody is answered."""
    story, chance = Fleet(), random.Random(7)
    try:
        events = 0
        while events < most:
            who, which = chance.randrange(CLIENTS), chance.randrange(SAMPLERS)
            match chance.randrange(10):
                case 0:
                    story.step(who, 0.1)
                case 1:
                    story.save_sampler(who)
                case 2 | 3 | 4 | 5:
                    story.sample(who, chance.randrange(9), chance.randrange(1, 20), chance.randrange(1, 12))
                case 6:
                    story.finish_commands(chance.randrange(1, 6))
                case 7:
                    story.let_a_sampler_join(which)
                    events += 1
                case _:
                    story.losses = 0
                    story.lose_a_sampler(which, chance.randrange(6))
                    events += 1
            if events % 20 == 0:
                story.finish_everything()
                story.answers_are_right()
        story.finish_everything()
        assert story.coordinator.groups[0].generations == 1
        assert sum(len(client.samples) for client in story.clients) > most // 2
        assert sum(group.generations for group in story.coordinator.groups[1:]) > most // 10
    finally:
        story.teardown()


def test_a_poisoned_sample_ends_two_generations_in_all():
    """What may have ended a group's workers waits for them, while all others go on elsewhere."""
    story = PatientFleet()
    try:
        story.save_sampler(0)
        story.finish_everything()
        story.answers_are_right()
        client = story.clients[0]
        for _ in range(4):
            story.sample(0, 0, 5, 12)
        poisoned = client.samples[0]
        blamed = 0
        for _ in range(200):
            for group in story.coordinator.groups:
                at_work = [requests for _, _, requests in group.workers.pending]
                if any(poisoned.request_id in requests for requests in at_work[:1]):
                    group.workers.lose(lost(by_command=True), executed=0)
                    blamed += 1
            story.wait_for(story.settle())
            for group in story.coordinator.groups:
                group.workers.finish(1)
                group.workers.write()
        story.wait_for(story.look_for_answers(again=False))
        assert blamed == 2
        assert isinstance(poisoned.outcome, Failed)
        assert "the workers were lost 2 times" in poisoned.outcome.error
        assert sum(group.generations for group in story.coordinator.groups) == 1 + SAMPLERS + 2
        client.samples.remove(poisoned)
    finally:
        story.teardown()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_answer_changes_in_many_stories_of_groups_and_the_coordinator():
    many = settings(FAST, max_examples=60, stateful_step_count=60, derandomize=False)
    run_state_machine_as_test(Fleet, settings=many)


SPEEDS = {"decode": 4e-3, "prefill": 1e-3}  # seconds of a token, of four rows at once, and of a prompt
FIRST, SECOND, THIRD = ([*range(first, first + 40)] for first in (1, 50, 100))


class Conversations(PatientFleet):
    """Clients that send each answer back with the next turn."""

    samplers = 2

    def ask(self, prompt: list[int], count: int = 20) -> Asked:
        """Sample."""
        client = self.clients[0]
        asked = client.sample(next(iter(client.samplers)), prompt, count)
        self.wait_for(self.send(asked, len(prompt) + count))
        self.wait_for(self.settle())
        return asked

    def let_work(self, groups: list[SimulatedGroup], wanted: list[Asked]) -> None:
        """Let these groups alone execute commands until all that is wanted is answered."""
        while any(asked.outcome is None for asked in wanted):
            assert sum(group.workers.finish(1) for group in groups), "all wait for other groups"
            self.wait_for(self.settle())
            self.wait_for(self.look_for_answers(again=False))

    def turn(self, prompt: list[int], count: int = 20) -> SimulatedGroup:
        """Sample, and return where."""
        asked = self.ask(prompt, count)
        assert asked.request_id is not None
        (group,) = (each for each in self.coordinator.groups if each.scheduler.holds(asked.request_id))
        return group

    def held(self, group: SimulatedGroup) -> int:
        """Count the samples that a group has."""
        return len(group.scheduler.samples())

    async def send(self, asked: Asked, tokens: int) -> None:
        """Submit a sample as routes do, which say how many tokens it takes at most."""
        asked.request_id = await self.coordinator.queue.submit(
            asked.kind, asked.line, asked.seq_id, asked.session_id, asked.payload, tokens=tokens
        )


@pytest.fixture
def conversations(monkeypatch):
    """Two groups that have loaded the weights and know no prompt alike; no clock decides where samples go."""
    monkeypatch.setattr(routing, "KEPT_TOGETHER_SECONDS", 0.0)
    monkeypatch.setattr(CommandSeconds, "of_token", lambda self, step: SPEEDS.get(step))

    story = Conversations()
    try:
        story.save_sampler(0)
        story.finish_everything()
        story.answers_are_right()
        while story.turn(THIRD) is not story.sampler(1):
            assert len(story.clients[0].samples) < 50
        story.finish_everything()
        yield story
    finally:
        story.teardown()


def test_the_next_turn_of_a_conversation_goes_where_its_prefix_is(conversations):
    story = conversations
    assert [story.turn(prompt) for prompt in (SECOND, FIRST)] == [story.sampler(0), story.sampler(1)]
    story.finish_everything()
    for _ in range(3):
        assert story.turn([*FIRST, 7, 8, 9]) is story.sampler(1)
        story.finish_everything()


def test_a_turn_goes_elsewhere_when_waiting_takes_longer_than_reading_its_prefix(conversations):
    story = conversations
    assert [story.turn(prompt) for prompt in (SECOND, FIRST)] == [story.sampler(0), story.sampler(1)]
    story.finish_everything()
    went = [story.turn([*FIRST, 7, 8, 9]) for _ in range(3)]
    assert went == [story.sampler(1), story.sampler(1), story.sampler(0)]


def test_prompts_that_wait_count_for_as_long_as_it_takes_to_read_them(conversations, monkeypatch):
    story = conversations
    monkeypatch.setitem(SPEEDS, "prefill", 1e-5)
    assert [story.turn(SECOND, count=2), story.turn(FIRST)] == [story.sampler(0), story.sampler(1)]
    went = [story.turn([number, *range(150, 190)], count=2) for number in range(3)]
    assert went == [story.sampler(0)] * 3


def test_a_group_without_samples_takes_some_that_wait_for_another_one(conversations):
    story = conversations
    moved, routed = (
        metric.labels(*labels)
        for metric, labels in (
            (metrics.MOVED_SAMPLES, ["idle"]),
            (metrics.ROUTED_SAMPLES, ["sampler-0", "waiting"]),
        )
    )
    before = moved._value.get(), routed._value.get()
    went = [story.turn([number, *range(150, 190)]) for number in range(16)]
    idle, busy = story.sampler(0), story.sampler(1)
    assert (went.count(idle), went.count(busy)) == (8, 8)
    assert routed._value.get() - before[1] == 8
    begun, waiting = story.held(busy), len(busy.scheduler.movable())
    assert 1 < waiting < begun
    while moved._value.get() == before[0]:
        assert idle.workers.finish(1), "it has taken nothing"
        story.wait_for(story.settle())
    assert len(busy.scheduler.movable()) == waiting // 2
    assert story.held(idle) == moved._value.get() - before[0] == waiting - waiting // 2
    story.finish_everything()
    story.answers_are_right()


def test_what_waits_stays_where_its_prompt_was_read_when_another_group_is_idle(conversations, monkeypatch):
    story = conversations
    monkeypatch.setitem(SPEEDS, "prefill", 1.0)
    monkeypatch.setattr(routing, "KEPT_TOGETHER_SECONDS", 1e6)
    assert [story.turn(prompt) for prompt in (SECOND, FIRST)] == [story.sampler(0), story.sampler(1)]
    story.finish_everything()
    went = [story.turn(prompt) for prompt in (SECOND, *[FIRST] * 9)]
    assert went == [story.sampler(0), *[story.sampler(1)] * 9]
    waiting = len(story.sampler(1).scheduler.movable())
    assert waiting > 1
    while story.held(story.sampler(0)):
        assert story.sampler(0).workers.finish(1)
        story.wait_for(story.settle())
    assert len(story.sampler(1).scheduler.movable()) == waiting
    story.finish_everything()


def test_no_sample_waits_for_a_mesh_that_trains(conversations):
    """All are drawn while its device does nothing, although it has work."""
    story = conversations
    trainer, *samplers = story.coordinator.groups
    for number in range(4):
        story.train(1, [30, 20, 10], number * 5 + 1)
        story.step(1, 0.1)
    busy = list(trainer.workers.pending)
    story.let_work(samplers, [story.ask([number, *range(150, 190)]) for number in range(8)])
    assert busy
    assert list(trainer.workers.pending) == busy
    story.finish_everything()
    story.answers_are_right()


def test_no_step_waits_for_samples_of_other_meshes(conversations):
    story = conversations
    trainer, *samplers = story.coordinator.groups
    asked = [story.ask([number, *range(150, 190)]) for number in range(16)]
    story.train(1, [30, 20, 10], 6)
    story.step(1, 0.1)
    story.let_work([trainer], story.clients[1].asked[-2:])
    assert all(group.workers.pending for group in samplers)
    assert not any(each.outcome for each in asked)
    story.finish_everything()
    story.answers_are_right()
