"""The worst moment of a coordinator: large bodies, many samples, and clients that must not be forgotten."""

import asyncio
import json
import multiprocessing
import time
from multiprocessing.connection import Connection as Pipe

import numpy as np

from spmd_tx.coordinator.wire import tinker_pb2 as pb
from tools.bench.coordinator_load import (
    BYTES_PER_TOKEN,
    DATUM_TOKENS,
    Tenant,
    forward_body,
    open_tenant,
    retrieve,
)
from tools.bench.loopback_client import PROTOBUF, connect
from tools.bench.served import Served

BODY_BYTES = 3_300_000
SAMPLES, SAMPLE_TOKENS = 512, 32
TENANTS, HEARTBEATS = 8, 32
HEARTBEAT_SECONDS = 0.5  # between two of one client, which is twenty times as often as the SDK


async def burst(server: Served, bodies: int) -> dict[str, float]:
    tenants = [await open_tenant(server.url) for _ in range(TENANTS)]
    lengths = [DATUM_TOKENS] * (BODY_BYTES // (BYTES_PER_TOKEN * DATUM_TOKENS))
    ours, theirs = multiprocessing.Pipe()
    beating = multiprocessing.Process(target=beat, args=(server.url, theirs))
    beating.start()
    await asyncio.to_thread(ours.recv)  # it begins
    server.forget_peak()
    loop = asyncio.get_running_loop()
    cpu, began, before = server.cpu(), loop.time(), server.memory()
    async with asyncio.TaskGroup() as group:
        large = [group.create_task(_train(tenants[n % TENANTS], lengths)) for n in range(bodies)]
        small = [group.create_task(_sample(tenants[n % TENANTS])) for n in range(SAMPLES)]
    seconds, cpu = loop.time() - began, server.cpu() - cpu
    ours.send("stop")
    heartbeats = await asyncio.to_thread(ours.recv)
    beating.join()
    accepted, _ = zip(*[each.result() for each in large], strict=True)
    return {
        "seconds": round(seconds, 1),
        "bodies accepted s": round(max(accepted), 1),
        "samples done s": round(max(each.result() for each in small), 1),
        "heartbeats": len(heartbeats),
        "heartbeat median ms": round(float(np.median(heartbeats)), 1),
        "heartbeat p95 ms": round(float(np.percentile(heartbeats, 95)), 1),
        "heartbeat max ms": round(max(heartbeats), 1),
        "memory before MB": round(before / 1e6),
        "peak memory MB": round(server.peak_memory() / 1e6),
        "cpu s": round(cpu, 1),
    }


async def _train(tenant: Tenant, lengths: list[int]) -> tuple[float, float]:
    """Return the seconds until the body was accepted, and until its result was there."""
    began = time.monotonic()
    number, tenant.next_training = tenant.next_training, tenant.next_training + 1
    connection = await connect(tenant.url)
    body = forward_body(tenant, *lengths) + pb.ForwardBackwardRequest(seq_id=number).SerializeToString()
    answer = await connection.post("forward_backward", body, PROTOBUF)
    assert answer.status == 200, answer
    accepted = time.monotonic() - began
    await retrieve(connection, answer.json()["request_id"])
    connection.close()
    return accepted, time.monotonic() - began


async def _sample(tenant: Tenant) -> float:
    began = time.monotonic()
    connection = await connect(tenant.url)
    await tenant.sample(connection, SAMPLE_TOKENS)
    connection.close()
    return time.monotonic() - began


def beat(url: str, pipe: Pipe) -> None:
    """Send the heartbeats of many clients. Runs in its own process, which has nothing else to do."""
    pipe.send(None)
    pipe.send(asyncio.run(_beat(url, pipe)))


async def _beat(url: str, pipe: Pipe) -> list[float]:
    milliseconds = list[float]()

    async def client() -> None:
        connection = await connect(url)
        session = (await connection.call("create_session", tags=[], sdk_version="0.38.0"))["session_id"]
        body = json.dumps({"session_id": session}).encode()
        while not pipe.poll():
            began = time.perf_counter()
            answer = await connection.post("session_heartbeat", body)
            milliseconds.append(1e3 * (time.perf_counter() - began))
            assert answer.status == 200, answer
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async with asyncio.TaskGroup() as group:
        for _ in range(HEARTBEATS):
            group.create_task(client())
    return milliseconds
