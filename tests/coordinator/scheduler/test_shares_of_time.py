"""Who gets how much of the devices' time, simulated with a clock of its own."""

import asyncio
from collections import Counter, deque
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from spmd_tx.coordinator.images.pool import ImagePool
from spmd_tx.coordinator.mesh.compilation import Compilation
from spmd_tx.coordinator.requests.quarantine import Quarantine
from spmd_tx.coordinator.scheduler.dispatcher import Dispatcher
from spmd_tx.coordinator.scheduler.generation import GenerationParts
from spmd_tx.coordinator.scheduler.request_table import RequestTable
from spmd_tx.coordinator.training.attention_cost import AttentionCost
from spmd_tx.coordinator.training.batching import pack
from spmd_tx.coordinator.training.losses import LossSettings
from spmd_tx.coordinator.training.model import TrainedModel
from spmd_tx.coordinator.training.packing import TrainingShapes
from spmd_tx.coordinator.training.slots import TrainingSlots
from spmd_tx.coordinator.wire.training_protobuf import Datum
from spmd_tx.protocol.commands import LOSS_NAMES, Decode, ForwardBackward
from spmd_tx.protocol.reports import Reply
from tests.coordinator.scheduler.fake_sampling import FakeSampling
from tests.coordinator.training.fake_log import FakeLog
from tests.support.ready_programs import EverythingReady

SHAPES = TrainingShapes(1, 8192, (256, 8192), max_context=8192, attention=AttentionCost(1e-3))
TOKENS_PER_SECOND = 25_000  # that one H100 trains, of a model with 8 billion parameters


class Devices:
    """Executes commands one after the other, each in the seconds that the test gives it."""

    def __init__(self, seconds):
        self.now = 0.0
        self.used = Counter()  # seconds by kind of command, and by training slot
        self.slots = []  # of the micro-batches so far
        self.seconds = seconds
        self._sent = deque()

    def send(self, command, requests=()):
        answer = asyncio.get_running_loop().create_future()
        self._sent.append((command, answer))
        return answer

    async def work(self):
        """Execute the oldest command."""
        command, answer = self._sent.popleft()
        seconds = self.seconds(command)
        self.now += seconds
        self.used[type(command)] += seconds
        if isinstance(command, ForwardBackward):
            self.slots.append(int(command.rows.slots[0]))
            self.used[self.slots[-1]] += seconds
        shape = command.rows.tokens.shape if isinstance(command, ForwardBackward) else ()
        arrays = {name: np.zeros(shape, np.float32) for name in ("logprobs", "losses")}
        answer.set_result(Reply(generation=1, process=0, sequence=0, arrays=arrays))
        await asyncio.sleep(0)


class Server:
    """A dispatcher on such devices; models have as many micro-batches ready, or under way, as given."""

    def __init__(self, devices, *, sampling=None, ahead=4):
        self.devices, self.sampling = devices, sampling or FakeSampling()
        training = SimpleNamespace(slots=TrainingSlots(4), shapes=SHAPES, pool=ImagePool())
        self.dispatcher = Dispatcher(
            GenerationParts(devices, training, None, self.sampling, Compilation(devices, EverythingReady())),
            RequestTable(Quarantine()),
            FakeLog(announce=None),
            on_reply=lambda: None,
            clock=lambda: devices.now,
        )
        self.models = {}
        self._ahead = ahead

    def train(self, session, row_length, rows, tenant="local"):
        model = TrainedModel(f"{session}:train:0", session, tenant, on_step=lambda: None)
        tokens = np.zeros(row_length, np.int64)
        inputs = {"target_tokens": tokens, "weights": np.ones(row_length, np.float32)}
        datums = [Datum(tokens.astype(np.int32), inputs)] * rows
        self.models[model] = (
            pack(datums, LossSettings(kind=LOSS_NAMES.index("cross_entropy")), False, SHAPES).chunks,
            deque(),
        )

    async def run(self, seconds):
        """Work so long; returns the shares of time by kind of command and by training slot."""
        start, before = self.devices.now, Counter(self.devices.used)
        while self.devices.now < start + seconds:
            self._put_more()
            self.dispatcher.dispatch(list(self.models))
            await self.devices.work()
            list(self.dispatcher.absorb())
            self.dispatcher.dispatch(list(self.models))  # a client needs a moment to send more
        used = self.devices.used - before
        return {what: each / (self.devices.now - start) for what, each in used.items()}

    def _put_more(self):
        for model, (chunks, outputs) in self.models.items():
            while outputs and outputs[0].done():
                outputs.popleft()
            while len(outputs) < self._ahead:
                outputs.extend(model.put_chunks(chunks))


def sampling(rows=1024):
    samples = FakeSampling()
    samples.decodes, samples.rows = 10**9, rows
    samples.admit("sample", None, None)
    return samples


def as_on_an_accelerator(decode_as_long_as):
    """The costs of commands; a decode takes as long as training this many tokens."""

    def seconds(command):
        tokens = command.rows.tokens.size if isinstance(command, ForwardBackward) else decode_as_long_as
        return tokens / TOKENS_PER_SECOND

    return seconds


@pytest.mark.parametrize("ahead", [2, 8], ids="{} ahead".format)
@pytest.mark.parametrize("decode_as_long_as", [500, 65_000, 150_000])
async def test_training_and_sampling_get_half_of_the_time_each(decode_as_long_as, ahead):
    server = Server(Devices(as_on_an_accelerator(decode_as_long_as)), sampling=sampling(), ahead=ahead)
    server.train("alice", row_length=1024, rows=8)
    shares = await server.run(min(300, decode_as_long_as / 10))  # thousands of short decodes
    assert shares[ForwardBackward] == pytest.approx(0.5, abs=0.05)
    assert shares[Decode] == pytest.approx(0.5, abs=0.05)


async def test_sessions_get_the_same_time_whatever_their_tokens_cost():
    def seconds(command):
        row_length = command.rows.tokens.shape[1]  # attention makes tokens of long rows dearer
        return command.rows.tokens.size * (1 + row_length / 1024) / TOKENS_PER_SECOND

    server = Server(Devices(seconds))
    server.train("alice", row_length=8192, rows=1)
    server.train("bob", row_length=64, rows=128)
    shares = await server.run(300)
    assert (shares[0], shares[1]) == pytest.approx((0.5, 0.5), abs=0.05)


async def test_tenants_get_the_same_time_however_many_sessions_they_have():
    server = Server(Devices(as_on_an_accelerator(65_000)))
    server.train("alice's", row_length=8192, rows=1, tenant="alice")
    for number in range(3):
        server.train(f"bob's {number}", row_length=8192, rows=1, tenant="bob")
    shares = await server.run(300)
    assert shares[0] == pytest.approx(1 / 2, abs=0.05)
    assert [shares[slot] for slot in (1, 2, 3)] == pytest.approx([1 / 6] * 3, abs=0.03)


async def test_commands_that_take_longer_than_before_are_paid_for_in_full():
    devices = Devices(lambda command: 0.3)
    server = Server(devices)
    server.train("alice", row_length=8192, rows=1)
    server.train("bob", row_length=64, rows=128)
    await server.run(100)
    devices.seconds = lambda command: 0.3 if command.rows.tokens.shape[1] == 8192 else 30.0
    shares = await server.run(1000)
    assert (shares[0], shares[1]) == pytest.approx((0.5, 0.5), abs=0.05)


async def test_those_in_flight_are_charged_for_before_they_are_answered():
    devices = Devices(lambda command: 0.3 if command.rows.tokens.shape[1] == 8192 else 30.0)
    server = Server(devices)
    server.train("alice", row_length=8192, rows=1)
    server.train("bob", row_length=64, rows=128)
    await server.run(200)
    devices.slots.clear()
    await server.run(500)
    assert (1, 1) not in pairwise(devices.slots)  # two could be sent before the first has taken its time


async def test_who_had_the_devices_alone_shares_them_with_a_newcomer_at_once():
    server = Server(Devices(as_on_an_accelerator(65_000)))
    server.train("alice", row_length=1024, rows=8)
    assert (await server.run(100))[ForwardBackward] == pytest.approx(1.0)
    server.sampling.decodes = 10**9
    server.sampling.admit("sample", None, None)
    shares = await server.run(30)
    assert shares[Decode] == pytest.approx(0.5, abs=0.1)
