"""Whatever crashes, and whenever: requests count once, in order, all are answered, and no answer changes."""

import asyncio
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import insert

from spmd_tx.coordinator.requests.records import Failed, Outcome
from spmd_tx.coordinator.storage.tables import ModelRow
from spmd_tx.coordinator.wire.sessions import CreateSessionRequest
from tests.coordinator.recovery.bench import Coordinator, lost
from tests.coordinator.recovery.oracle import RANK, Asked, Client
from tests.coordinator.scheduler.table_integrity import check_integrity
from tests.support.databases import make_database

CLIENTS = 3
STARVED_SECONDS = 30.0
MOST_GENERATIONS = 15  # of one example: after more losses in flight a request is given up
ANY = st.integers(0, 2**16)


class Crashes(RuleBasedStateMachine):
    """Clients of a coordinator whose workers, and which itself, are killed again and again."""

    samplers = 0  # groups that only sample

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="spmd-tx-machine-"))
        make_database(self.folder)
        self.loop = asyncio.new_event_loop()
        self.coordinator = Coordinator(self.folder, self.samplers)
        self.clients: list[Client] = []
        self.blames = 0
        self.losses = 0
        self.wait_for(self.begin())

    async def begin(self) -> None:
        await self.coordinator.open()
        for number in range(CLIENTS):
            session = await self.coordinator.catalog.create_session(CreateSessionRequest())
            client = Client(session.id)
            self.clients.append(client)
            await self.submit(client.create(seed=number))

    # --- clients --------------------------------------------------------------------------------------

    @rule(who=ANY, lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), token=st.integers(0, 90))
    def train(self, who, lengths, token):
        if client := self.idle(who):
            self.wait_for(self.submit(client.train(lengths, token, forward_only=token % 5 == 0)))

    @rule(who=ANY, count=st.integers(2, 4), sent=st.integers(0, 3), token=st.integers(0, 90))
    def train_in_chunks(self, who, count, sent, token):
        """The last chunk first; some of them arrive later, perhaps after a crash."""
        if client := self.idle(who):
            chunks = [client.train([3 + number], token, forward_only=False) for number in range(count)]
            client.held_back = chunks[: max(1, count - sent)]
            for chunk in reversed(chunks[len(client.held_back) :]):
                self.wait_for(self.submit(chunk))

    @rule(who=ANY)
    def send_what_was_held_back(self, who):
        client = self.clients[who % CLIENTS]
        while client.held_back:
            self.wait_for(self.submit(client.held_back.pop()))

    @rule(who=ANY, learning_rate=st.floats(0.001, 1.0))
    def step(self, who, learning_rate):
        if client := self.idle(who):
            self.wait_for(self.submit(client.step(learning_rate)))

    @rule(who=ANY)
    def ask_for_the_impossible(self, who):
        if client := self.idle(who):
            self.wait_for(self.submit(client.train_badly()))

    @rule(who=ANY)
    def save(self, who):
        if client := self.idle(who):
            self.wait_for(self.submit(client.save()))

    @rule(who=ANY, which=ANY, optimizer=st.booleans())
    def load(self, who, which, optimizer):
        if (client := self.idle(who)) and client.saved:
            path = sorted(client.saved)[which % len(client.saved)]
            self.wait_for(self.submit(client.load(path, optimizer)))

    @rule(who=ANY)
    def save_sampler(self, who):
        if client := self.idle(who):
            self.wait_for(self.submit(client.save_sampler()))

    @rule(who=ANY, which=ANY, length=st.integers(1, 20), count=st.integers(1, 12))
    def sample(self, who, which, length, count):
        if (client := self.idle(who)) and client.samplers:
            number = sorted(client.samplers)[which % len(client.samplers)]
            self.wait_for(self.submit(client.sample(number, list(range(1, length + 1)), count)))

    @rule(who=ANY, which=ANY)
    def send_again(self, who, which):
        """As the SDK does when the answer to a POST was lost."""
        sent = [each for each in self.clients[who % CLIENTS].everything if each.request_id is not None]
        asked = sent[which % len(sent)]
        before = asked.request_id
        self.wait_for(self.submit(asked))
        assert asked.request_id == before

    @precondition(lambda self: sum(client.has_ended for client in self.clients) < CLIENTS - 1)
    @rule(who=ANY)
    def end_session(self, who):
        if (client := self.idle(who)) and who % 4 == 0:
            client.has_ended = True
            self.wait_for(self.finish_session(client.session_id))

    # --- workers and crashes --------------------------------------------------------------------------

    @rule(turns=st.integers(1, 10))
    def let_time_pass(self, turns):
        self.wait_for(self.settle(turns))

    @rule(count=st.integers(1, 6))
    def finish_commands(self, count):
        self.wait_for(self.settle())
        for group in self.coordinator.groups:
            group.workers.finish(count)
        self.wait_for(self.settle())

    @rule()
    def delay_the_outcomes_of_gradients(self):
        self.coordinator.hold_outcomes()

    @rule()
    def finish_everything(self):
        self.coordinator.release_outcomes()
        self.wait_for(self.work_off(rounds=20))

    @rule()
    def complete_folders(self):
        for group in self.coordinator.groups:
            group.workers.write()
        self.wait_for(self.settle())

    @precondition(lambda self: self.losses < MOST_GENERATIONS)
    @rule(executed=st.integers(0, 3), is_blamed=st.booleans())
    def lose_the_workers(self, executed, is_blamed):
        self.losses += 1
        self.blames += is_blamed
        by_command = is_blamed and self.blames == 1  # after the second time the request is given up
        self.coordinator.release_outcomes()
        self.coordinator.workers.lose(lost(by_command), executed)
        self.wait_for(self.settle())

    @precondition(lambda self: self.losses < MOST_GENERATIONS)
    @rule(executed=st.integers(0, 3))
    def kill_the_coordinator(self, executed):
        self.losses += 1
        for group in self.coordinator.groups:
            group.workers.lose(lost(), executed)  # they do not outlive it
        self.wait_for(self.restart())

    @precondition(lambda self: self.losses < MOST_GENERATIONS)
    @rule(who=ANY, turns=st.integers(0, 5))
    def kill_the_coordinator_while_a_request_comes_in(self, who, turns):
        if client := self.idle(who):
            self.losses += 1
            self.wait_for(self.restart_while_sending(client.train([5], 1, forward_only=False), turns))

    # --- what must be ---------------------------------------------------------------------------------

    @invariant()
    def answers_are_right(self):
        self.coordinator.check()
        for group in self.coordinator.groups:
            check_integrity(group.scheduler._table)
        self.wait_for(self.look_for_answers(again=False))
        for client in self.clients:
            client.check()

    def teardown(self) -> None:
        try:
            self.wait_for(self.end_well())
        finally:
            self.wait_for(self.coordinator.kill())
            self.loop.close()
            shutil.rmtree(self.folder)

    async def end_well(self) -> None:
        """Without more faults, everything is answered."""
        self.coordinator.release_outcomes()
        for client in self.clients:
            while client.held_back:
                await self.submit(client.held_back.pop(0))
        until = time.monotonic() + STARVED_SECONDS
        while unanswered := [
            each for client in self.clients for each in client.everything if each.outcome is None
        ]:
            assert time.monotonic() < until, f"nobody answers {unanswered}"
            await self.work_off(rounds=5)
            self.coordinator.check()
            await self.look_for_answers(again=False)
        await self.look_for_answers(again=True)
        for client in self.clients:
            expected = client.check()
            if not client.has_ended:
                assert await self.state_of(client) == expected

    async def state_of(self, client: Client) -> object:
        """The model's state on the device, once it is restored."""
        until = time.monotonic() + STARVED_SECONDS
        while (
            (execution := self.coordinator.scheduler._execution) is None
            or execution._is_lost()  # its lines wait for nothing any more, whatever was restored
            or not execution.lines[client.model_id].restored.is_set()
        ):
            assert time.monotonic() < until, f"{client.model_id} is never restored"
            await self.work_off(rounds=2)
        await self.work_off(rounds=10)  # what has no answer: a snapshot that is loaded
        device, model = self.coordinator.workers.device, execution.lines[client.model_id].model
        return device.slots[model.slot] if model.has_slot else device.swapped[model.id]

    # --- how ------------------------------------------------------------------------------------------

    def idle(self, who: int) -> Client | None:
        """A client that may send its next call."""
        client = self.clients[who % CLIENTS]
        return None if client.has_ended or client.held_back else client

    def wait_for(self, work) -> None:
        self.loop.run_until_complete(work)

    async def settle(self, turns: int = 3) -> None:
        for _ in range(turns):
            await asyncio.sleep(0.001)

    async def work_off(self, rounds: int) -> None:
        for _ in range(rounds):
            await self.settle()
            for group in self.coordinator.groups:
                group.workers.finish(100)
                group.workers.write()

    async def finish_session(self, session_id: str) -> None:
        await self.coordinator.catalog.end_session(session_id, "its client finished")
        for group in self.coordinator.groups:
            group.scheduler.session_ended(session_id)

    async def submit(self, asked: Asked) -> None:
        also = [_row(asked)] if asked.kind == "create_model" else []
        asked.request_id = await self.coordinator.queue.submit(
            asked.kind, asked.line, asked.seq_id, asked.session_id, asked.payload, also=also
        )

    async def restart(self) -> None:
        await self.coordinator.kill()
        self.coordinator = Coordinator(self.folder, self.samplers)
        await self.coordinator.open()
        await self.settle()
        await self.look_for_answers(again=True)

    async def restart_while_sending(self, asked: Asked, turns: int) -> None:
        sending = asyncio.create_task(self.submit(asked))
        await self.settle(turns)
        await self.restart()
        assert sending.done()
        before = asked.request_id  # if the client has heard of it
        await self.submit(asked)
        assert before in (None, asked.request_id)

    async def look_for_answers(self, again: bool) -> None:
        """Poll like a client; ``again``: also for what is known, which must be the same."""
        for client in self.clients:
            for asked in client.everything:
                if asked.request_id is None or (asked.outcome is not None and not again):
                    continue
                outcome = await self.coordinator.queue.wait(asked.request_id, timeout=0)
                if asked.outcome is not None:
                    assert outcome is not None, "an answer is gone"
                    assert _content(outcome) == _content(asked.outcome), "an answer has changed"
                asked.outcome = outcome


def _content(outcome: Outcome) -> object:
    if isinstance(outcome, Failed):
        return outcome.error, outcome.category
    return outcome.content_type, outcome.body


def _row(asked: Asked):
    return insert(ModelRow).values(
        id=asked.line,
        session_id=asked.session_id,
        base_model="tiny",
        rank=RANK,
        alpha=32.0,
        train_attn=True,
        train_mlp=True,
        train_unembed=True,
        user_metadata=None,
        created_at=time.time(),
    )


FAST = settings(
    max_examples=20,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_requests_count_once_and_in_order_whatever_crashes():
    run_state_machine_as_test(Crashes, settings=FAST)


def test_loads_behind_an_unanswered_request_displace_no_snapshot_that_is_needed():
    story = Crashes()
    try:
        for _ in range(2):
            story.step(0, 0.1)
            story.finish_everything()
        story.save(0)
        story.finish_everything()
        story.answers_are_right()
        story.delay_the_outcomes_of_gradients()
        story.train(0, [5], 1)
        for which in range(3):
            story.load(0, which, optimizer=True)
            for _ in range(3):
                story.let_time_pass(10)
                story.finish_commands(6)
        story.kill_the_coordinator(executed=0)
    finally:
        story.teardown()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_requests_count_once_and_in_order_in_many_more_stories():
    many = settings(FAST, max_examples=400, stateful_step_count=80, derandomize=False)
    run_state_machine_as_test(Crashes, settings=many)
