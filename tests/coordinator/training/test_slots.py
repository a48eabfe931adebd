import asyncio

import pytest

from spmd_tx.coordinator.training.model import TrainedModel
from spmd_tx.coordinator.training.slots import TURN, TrainingSlots
from spmd_tx.protocol.commands import Drop, ForwardBackward
from spmd_tx.protocol.places import Idle
from tests.coordinator.training.bench import HALF, SHORT_ROWS, running
from tests.coordinator.training.fake_trainer import FakeTrainer

MODELS = A, B, C, D = [f"{name}:train:0" for name in ("alice", "bob", "carol", "dave")]
LONG = [250] * 16  # one micro-batch of 4096 tokens
SWAPS = OUT, IN = "swap_out", "swap_in"


@pytest.fixture
async def bench(tmp_path):
    async with running(tmp_path, slots=2) as bench:
        yield bench


async def create(bench, *models):
    for seed, model in enumerate(models):
        await bench.result(bench.create(model, seed=seed))


def swaps(bench):
    found = []
    for each in bench.workers.sent(*SWAPS):
        slot, idle = (each.source, each.target) if each.name == OUT else (each.target, each.source)
        found.append((each.name, idle.name, slot.slot))
    return found


def weights(bench):
    """Return the weights of all models, on the device or swapped out."""
    lines = bench.scheduler._execution.lines
    found = {model: weights for model, (weights, _) in bench.workers.swapped.items()}
    for model in MODELS:
        if lines[model].model.has_slot:
            found[model] = bench.workers.weights[lines[model].model.slot]
    return found


async def train_in_turns(bench):
    """Two gradients and a step of each model, whose gradients are swapped out in between."""
    for number, model in enumerate(MODELS):
        bench.train(model, 1, 10 + number)
        await bench.settled()
    for number, model in enumerate(MODELS):
        bench.train(model, 2, 20 + number)
        await bench.settled()
    for model in MODELS:
        await bench.result(bench.step(model, 3, learning_rate=0.5))


async def test_more_models_than_slots_learn_what_each_learns_alone(bench):
    await create(bench, *MODELS)
    await train_in_turns(bench)
    # A datum of n equal tokens 1 has the loss n * 9/8 (see the fake trainer); the first weights are the seed.
    assert weights(bench) == {
        model: number - 0.5 * 9 / 8 * (30 + 2 * number) for number, model in enumerate(MODELS)
    }


async def test_the_model_that_was_idle_for_longest_leaves(bench):
    await create(bench, A, B)
    await bench.result(bench.step(A, 1))
    await create(bench, C)
    assert swaps(bench) == [(OUT, B, 1)]
    await bench.result(bench.step(B, 1))
    assert swaps(bench)[1:] == [(OUT, A, 0), (IN, B, 0)]


async def test_a_new_model_takes_a_free_slot_and_nothing_is_swapped(bench):
    await create(bench, A, B)
    bench.scheduler.session_ended("alice")
    await create(bench, C)
    assert swaps(bench) == []
    assert bench.workers.sent("create_adapter")[-1].target.slot == 0


async def test_a_model_keeps_its_slot_while_it_has_work_until_its_turn_is_over(bench):
    bench.scheduler._execution._dispatcher.clock = lambda: 0.0  # sessions take turns, whatever time it takes
    await create(bench, A, B, C)
    await bench.settled()
    bench.workers.is_holding = True
    rounds = 2 * TURN // 4096
    for model in (B, C):
        for seq_id in range(1, rounds + 1):
            bench.train(model, seq_id, *LONG)
    await bench.until(lambda: len(bench.workers.held) == 2)
    stepped = bench.step(A, 1)
    await bench.prepared(A)
    lines = bench.scheduler._execution.lines
    while stepped not in bench.log.outcomes:  # the next ones are always ready before there is a reply
        await bench.until(
            lambda: all(lines[each].model.unsent or not lines[each].model.has_more() for each in (B, C))
        )
        bench.workers.answer(min(1, len(bench.workers.held)))
        await asyncio.sleep(0.001)
    bench.let_go()
    await bench.settled()
    sent = bench.workers.commands
    _, out, *_ = bench.workers.sent(OUT)  # A for C, then one of these for A
    batches = [each for each in sent[: sent.index(out)] if isinstance(each, ForwardBackward)]
    tokens = sum(each.rows.tokens.size for each in batches if out.source.slot in each.rows.slots)
    assert TURN <= tokens <= TURN + 4096


async def test_those_who_wait_for_a_slot_are_told_so(bench):
    await create(bench, A, B, C)
    bench.workers.is_holding = True
    for model in (B, C):
        for seq_id in range(1, 9):
            bench.train(model, seq_id, *LONG)
    await bench.until(lambda: len(bench.workers.held) == 2)
    await bench.prepared(B, 4)
    await bench.prepared(C, 4)
    waiting = bench.step(A, 1)
    await bench.prepared(A)
    status = bench.scheduler.status(waiting)
    assert status.queue_state == "paused_capacity"
    assert "waiting for one of the 2 training slots" in status.reason
    bench.let_go()
    await bench.settled()
    assert bench.scheduler.status(waiting).reason is None


async def test_who_comes_from_the_host_joins_others_and_takes_none_of_their_slots(tmp_path):
    async with running(tmp_path, shapes=SHORT_ROWS) as bench:
        await create(bench, *MODELS)
        await bench.settled()
        bench.workers.is_holding = True
        blockers = [bench.step(D, seq_id) for seq_id in range(1, 4)]
        await bench.until(lambda: len(bench.workers.held) == len(blockers))
        for model in (A, B):
            bench.train(model, 1, *HALF)
            await bench.prepared(model)
        bench.let_go()
        await bench.settled()
        [together] = bench.workers.sent(ForwardBackward)
        used = {
            int(slot)
            for slot, row in zip(together.rows.slots, together.rows.segments, strict=True)
            if row.any()
        }
        assert used == {0, 1}


async def test_a_model_whose_session_has_ended_is_forgotten_by_the_workers(bench):
    await create(bench, A, B, C)
    assert swaps(bench) == [(OUT, A, 0)]
    bench.scheduler.session_ended("alice")
    await bench.until(lambda: bench.workers.sent(Drop))
    assert [each.places for each in bench.workers.sent(Drop)] == [[Idle(A)]]
    assert bench.workers.swapped == {}


async def test_a_snapshot_is_taken_of_models_without_a_slot_too(bench):
    await create(bench, A, B, C)
    for model in (A, B, C):
        await bench.result(bench.train(model, 1, 10))
        await bench.result(bench.step(model, 2, learning_rate=0.5))
    await bench.scheduler.drain()
    assert len(bench.workers.sent("snapshot")) == 3


async def test_after_a_crash_more_models_than_slots_are_what_they_were(bench):
    await create(bench, *MODELS)
    await train_in_turns(bench)
    before = weights(bench)
    bench.run.cancel()
    await asyncio.wait([bench.run])
    bench.workers = FakeTrainer()
    await bench.start()
    for model in MODELS:
        await bench.result(bench.step(model, 4, learning_rate=0.0))
    assert weights(bench) == before
    assert bench.workers.sent(IN)


class Asking(TrainedModel):
    """A model whose first step waits to be sent."""

    def __init__(self, name: str, session: str | None = None) -> None:
        super().__init__(name, session or name, "somebody", on_step=lambda: None)
        self.put_later(list, tuple, fills_slot=True)


async def test_where_all_weights_are_trained_models_follow_each_other_in_the_order_of_their_coming():
    slots, models = TrainingSlots(1, until_session_ends=True), [Asking(name) for name in MODELS[:3]]
    a, b, c = models

    def seatable():
        return slots.seatable(models, models[::-1], at_once=True)

    assert seatable() == [a]
    assert slots.seat(a) == []
    assert seatable() == [a]  # also when it has no work: b and c wait for the end of its session
    assert slots.obstacle(a) is None
    assert slots.obstacle(b).endswith("place 1 in the queue")
    assert slots.obstacle(c).endswith("place 2 in the queue")
    slots.free(b)  # has given up
    models.remove(b)
    slots.free(a)
    models.remove(a)
    assert seatable() == [c]
    assert slots.seat(c) == []
    assert slots.obstacle(c) is None


async def test_where_all_weights_are_trained_models_of_one_session_take_turns():
    slots, first, second = (
        TrainingSlots(1, until_session_ends=True),
        Asking(A, "alice"),
        Asking("alice:train:1", "alice"),
    )
    other, models = Asking(B), []
    models += [first, other, second]
    assert slots.seatable(models, models, at_once=True) == [first]
    slots.seat(first)
    assert slots.seatable(models, models, at_once=False) == [first]  # it has work ready
    assert "of its session" in slots.obstacle(second)
    first.unsent.clear()
    models.remove(first)
    assert slots.seatable(models, models, at_once=True) == [second]
    assert [each.name for each in slots.seat(second)] == [OUT]
    assert slots.obstacle(other).endswith("place 1 in the queue")
