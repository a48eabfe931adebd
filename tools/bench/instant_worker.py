"""A worker process that computes nothing: every command is answered at once, with zeros of its shape.

The environment variable BENCH_SECONDS may give some commands a time, in JSON by their names; of a Decode
for each of its steps.
"""

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import zmq

sys.path.insert(0, str(Path(__file__).parents[2]))

from spmd_tx.protocol import commands, encoding, reports
from spmd_tx.protocol.envelope import Envelope
from spmd_tx.protocol.memory_plan import MemoryPlan
from spmd_tx.protocol.secret import Keys
from spmd_tx.protocol.setup import Setup

PAGES, TRAIN_TOKENS, ROWS = 1 << 16, 8192, 64  # where the server leaves the choice to its workers
BEAT_SECONDS = 1.0
SECONDS_OF = "BENCH_SECONDS"


def main() -> int:
    parser = argparse.ArgumentParser()
    for option in ("--coordinator", "--device-ids", "--model-dir"):
        parser.add_argument(option)
    for option in ("--process-id", "--generation", "--devices"):
        parser.add_argument(option, type=int)
    options = parser.parse_args()
    origin = {"generation": options.generation, "process": options.process_id}
    taking = json.loads(os.environ.get(SECONDS_OF, "{}"))
    keys = Keys.of(os.environ["SPMD_TX_SECRET"])

    def connect() -> zmq.Socket[bytes]:
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.set_hwm(0)
        keys.introduce(socket)
        socket.connect(options.coordinator)
        return socket

    def beat() -> None:
        socket = connect()
        while True:
            socket.send(encoding.encode(reports.Beat(**origin, sequence=None)))
            time.sleep(BEAT_SECONDS)

    threading.Thread(target=beat, daemon=True).start()
    socket = connect()
    socket.send(encoding.encode(reports.Hello(**origin, jax_port=1)))
    setup = encoding.decode_to_worker(socket.recv())
    assert isinstance(setup, Setup)
    plan = MemoryPlan(
        pages=PAGES,
        train_tokens=setup.train_tokens or TRAIN_TOKENS,
        decode_rows=setup.decode_rows or ROWS,
        adapter_slots=setup.adapter_slots,
    )
    socket.send(encoding.encode(reports.Ready(**origin, plan=plan, device="1 x nothing")))
    while True:
        envelope = encoding.decode_to_worker(socket.recv())
        assert isinstance(envelope, Envelope)
        time.sleep(seconds_of(envelope.command, taking))
        arrays, metrics = answer(envelope.command)
        reply = reports.Reply(**origin, sequence=envelope.sequence, arrays=arrays, metrics=metrics)
        socket.send(encoding.encode(reply))
        if isinstance(envelope.command, commands.Compile):
            compiled = reports.Compiled(**origin, number=envelope.command.number)
            socket.send(encoding.encode(compiled))
        if isinstance(envelope.command, commands.Shutdown):
            return 0


def seconds_of(command: commands.AnyCommand, taking: dict[str, float]) -> float:
    """Return how long a command takes."""
    steps = command.steps if isinstance(command, commands.Decode) else 1
    return steps * taking.get(command.name, 0.0)


def answer(command: commands.AnyCommand) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """What a reply must hold. Samples draw token 1, again and again."""
    match command:
        case commands.ForwardBackward(rows=rows) | commands.Forward(rows=rows):
            losses = np.zeros(rows.tokens.shape, np.float32)
            return {"logprobs": np.zeros(rows.targets.shape, np.float32), "losses": losses}, {}
        case commands.OptimStep() | commands.DimuonStep():
            return {}, {"grad_norm": 1.0, "applied": 1.0}
        case commands.Prefill(rows=rows, logprobs=True):
            return {"logprobs": np.zeros(rows.tokens.shape, np.float32)}, {}
        case commands.Decode(steps=steps, source=source):
            tokens = np.ones((steps, len(source)), np.int32)
            return {"tokens": tokens, "logprobs": np.zeros(tokens.shape, np.float32)}, {}
        case _:
            return {}, {}


if __name__ == "__main__":
    sys.exit(main())
