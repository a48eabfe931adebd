import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
import zmq
import zmq.asyncio

from spmd_tx.coordinator.broadcast import Hub
from spmd_tx.errors import CommandGap, WorkerLost
from spmd_tx.protocol import (
    AdapterSpec,
    CreateAdapter,
    Envelope,
    Failure,
    Hello,
    OptimStep,
    Progress,
    Ready,
    Reply,
    Setup,
    decode_to_worker,
    encode,
)

GENERATION = 3
COMMANDS = [CreateAdapter(slot=slot, seed=0, adapter=AdapterSpec(rank=4)) for slot in range(5)]


def setup(num_processes):
    return Setup(
        generation=GENERATION,
        num_processes=num_processes,
        jax_coordinator="127.0.0.1:1",
        model_dir="/model",
        dtype="auto",
        fsdp=1,
        ep=1,
        tp=1,
        adapter_slots=1,
        bank_slots=3,
        max_rank=8,
        max_context=64,
        page_size=4,
        kv_cache_tokens=0,
        decode_rows=4,
        decode_steps=4,
        compilation_cache="/cache",
    )


class FakeWorker:
    """One worker's end of the wire."""

    def __init__(self, context, hub, process, generation=GENERATION):
        self.origin = {"generation": generation, "process": process}
        self.socket = context.socket(zmq.DEALER)
        self.socket.connect(hub.address)

    async def report(self, kind, **fields):
        await self.socket.send(encode(kind(**self.origin, **fields)))

    async def receive(self):
        return decode_to_worker(await asyncio.wait_for(self.socket.recv(), 10))

    async def join(self, pages=9):
        await self.report(Hello)
        answer = await self.receive()
        await self.report(Ready, pages=pages, device="1 x fake")
        return answer


class Wire:
    def __init__(self, hub, context, running):
        self.hub, self.context, self.running = hub, context, running
        self.workers = []

    def worker(self, process, **options):
        self.workers.append(FakeWorker(self.context, self.hub, process, **options))
        return self.workers[-1]

    async def close(self):
        self.running.cancel()
        await asyncio.wait([self.running])
        for worker in self.workers:
            worker.socket.close(linger=0)
        self.context.term()
        self.hub.close()

    async def settle(self, worker):
        """Return when the hub has taken in all that the worker has sent so far."""
        await worker.report(Progress, message=f"mark of {worker.origin['process']}")
        while self.hub.busy != "mark of 0":
            await asyncio.sleep(0)


@asynccontextmanager
async def opened(num_processes):
    hub = Hub(setup(num_processes))
    context = zmq.asyncio.Context()
    running = asyncio.create_task(hub.run())
    wire = Wire(hub, context, running)
    yield wire
    await wire.close()


@pytest.fixture
async def wire():
    async with opened(num_processes=1) as wire:
        yield wire


@pytest.fixture
async def pair():
    async with opened(num_processes=2) as wire:
        yield wire


async def test_a_worker_that_says_hello_is_told_the_setup(wire):
    assert await wire.worker(0).join() == setup(1)


async def test_no_command_goes_out_before_all_workers_are_ready(pair):
    first, second = pair.worker(0), pair.worker(1)
    await first.join(pages=5)
    answer = pair.hub.send(COMMANDS[0])
    await second.report(Hello)
    await second.receive()
    assert await first.socket.poll(50) == 0
    await second.report(Ready, pages=7, device="1 x fake")
    assert (await pair.hub.all_ready()).pages == 5
    for worker in (first, second):
        assert await worker.receive() == Envelope(generation=GENERATION, sequence=0, command=COMMANDS[0])
    assert not answer.done()


async def test_commands_are_numbered_in_the_order_of_sending(wire):
    worker = wire.worker(0)
    for command in COMMANDS[:2]:
        wire.hub.send(command)
    await worker.join()
    await wire.hub.all_ready()
    for command in COMMANDS[2:]:
        wire.hub.send(command)
    received = [await worker.receive() for _ in COMMANDS]
    assert [envelope.sequence for envelope in received] == [0, 1, 2, 3, 4]
    assert [envelope.command for envelope in received] == COMMANDS


async def test_a_reply_is_there_when_all_workers_have_replied_and_carries_the_arrays_of_worker_0(pair):
    workers = pair.worker(0), pair.worker(1)
    for worker in workers:
        await worker.join()
    answers = [pair.hub.send(command) for command in COMMANDS[:2]]
    await workers[0].report(Reply, sequence=0, arrays={"tokens": np.arange(3)}, metrics={"grad_norm": 2.0})
    await workers[0].report(Reply, sequence=1)
    await pair.settle(workers[0])
    assert not any(answer.done() for answer in answers)
    await workers[1].report(Reply, sequence=0)
    reply = await answers[0]
    assert reply.arrays["tokens"].tolist() == [0, 1, 2]
    assert reply.metrics == {"grad_norm": 2.0}
    assert not answers[1].done()


async def test_a_missing_reply_ends_everything(wire):
    worker = wire.worker(0)
    await worker.join()
    for command in COMMANDS[:2]:
        wire.hub.send(command)
    await worker.report(Reply, sequence=1)
    with pytest.raises(CommandGap, match="expected the reply to command 0, received 1"):
        await wire.running


async def test_a_failure_of_a_worker_ends_receiving(wire):
    worker = wire.worker(0)
    await worker.join()
    await worker.report(Failure, message="ValueError: boom", traceback="Traceback ...")
    with pytest.raises(WorkerLost, match="worker 0 failed: ValueError: boom"):
        await wire.running


async def test_a_loss_fails_all_commands_now_and_later(wire):
    answer = wire.hub.send(COMMANDS[0])
    wire.hub.lose(WorkerLost("worker 0 is gone"))
    for each in (answer, wire.hub.send(COMMANDS[1])):
        with pytest.raises(WorkerLost, match="worker 0 is gone"):
            await each


async def test_the_first_loss_is_the_one_that_is_told(wire):
    wire.hub.lose(WorkerLost("first"))
    wire.hub.lose(WorkerLost("second"))
    with pytest.raises(WorkerLost, match="first"):
        await wire.hub.send(COMMANDS[0])


async def test_a_worker_of_another_protocol_is_refused(wire):
    await wire.worker(0).report(Hello, version=99)
    with pytest.raises(WorkerLost, match=r"speaks protocol 99 .* install the same version"):
        await wire.running


async def test_messages_of_another_generation_are_ignored(wire):
    old = wire.worker(0, generation=GENERATION - 1)
    await old.report(Hello)
    await old.report(Failure, message="old", traceback="")
    worker = wire.worker(0)
    await worker.join()
    assert (await wire.hub.all_ready()).pages == 9


async def test_strangers_and_noise_are_ignored(wire):
    worker = wire.worker(0)
    await worker.join()
    await wire.hub.all_ready()
    stranger = wire.worker(0)
    await stranger.report(Hello)
    await stranger.report(Failure, message="stranger", traceback="")
    await wire.worker(7).report(Hello)
    for noise in (b"", b"noise", b"\x81\xa2op\xa5reply"):
        await stranger.socket.send(noise)
    await worker.report(Progress, message="compiling")
    while wire.hub.busy != "compiling":
        await asyncio.sleep(0)


async def test_what_worker_0_is_busy_with_is_known(pair):
    first, second = pair.worker(0), pair.worker(1)
    assert pair.hub.busy == "starting"
    await first.report(Hello)
    await first.receive()
    await first.report(Progress, message="loading weights 45 %")
    while pair.hub.busy != "loading weights 45 %":
        await asyncio.sleep(0)
    await first.report(Ready, pages=1, device="")
    while pair.hub.busy != "waiting for worker 1":
        await asyncio.sleep(0)
    await second.join()
    await pair.hub.all_ready()
    assert pair.hub.busy is None


async def test_a_large_command_arrives_whole(wire):
    worker = wire.worker(0)
    await worker.join()
    await wire.hub.all_ready()
    command = OptimStep(
        slot=0, learning_rate=1.0, beta1=0.9, beta2=0.9, eps=0.0, weight_decay=0.0, grad_clip_norm=0.0
    )
    for _ in range(5000):
        wire.hub.send(command)
    for sequence in range(5000):
        assert (await worker.receive()).sequence == sequence
