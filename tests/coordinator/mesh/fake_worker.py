"""A worker process that speaks the protocol and runs commands on a FakeDevice instead of an accelerator.

It fails on purpose when a command says so: a fresh adapter with seed 1 raises, with seed 2 exits with code 7,
with seed 3 never answers. With FAKE_WORKER_FAILS_AT_START in the environment it never starts, with
FAKE_WORKER_DOES_NOT_FIT it says that it cannot.
"""

import os
import sys
import threading
import time
from pathlib import Path

import zmq

sys.path.insert(0, str(Path(__file__).parents[3]))

from spmd_tx.protocol import commands, encoding, reports
from spmd_tx.protocol.memory_plan import MemoryPlan
from spmd_tx.protocol.places import StateFolder
from spmd_tx.protocol.secret import Keys
from tests.coordinator.sampling.fake_device import FakeDevice

RAISE, EXIT, HANG = 1, 2, 3
EXIT_CODE = 7
LINGER_MS = 2_000
PAGES = 64


class Unwritten(FakeDevice):
    """Says of snapshots that they cannot be written, or the end of the server would wait for them."""

    def __init__(self, setup, report):
        super().__init__(setup.fsdp * setup.ep, PAGES, setup.page_size)
        self._report = report

    def execute(self, command):
        if isinstance(command, commands.Move) and isinstance(command.target, StateFolder):
            self._report(reports.Written, path=command.target.path, error="a fake worker writes no files")
        return super().execute(command)


def main(new_device=Unwritten, fails=(RAISE, EXIT, HANG)):
    options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))  # to import argparse takes long
    origin = {"generation": int(options["--generation"]), "process": int(options["--process-id"])}
    keys = Keys.of(os.environ["SPMD_TX_SECRET"])

    def connect(context):
        socket = context.socket(zmq.DEALER)
        keys.introduce(socket)
        socket.linger = LINGER_MS
        socket.connect(options["--coordinator"])
        return socket

    def beat():
        socket = connect(zmq.Context())
        while True:
            socket.send(encoding.encode(reports.Beat(**origin, sequence=None)))
            time.sleep(0.2)

    threading.Thread(target=beat, daemon=True).start()
    with zmq.Context() as context, connect(context) as socket:  # the last report is sent before the end
        return work(socket, origin, new_device, fails)


def work(socket, origin, new_device, fails):
    def report(kind, **fields):
        socket.send(encoding.encode(kind(**origin, **fields)))

    if "FAKE_WORKER_FAILS_AT_START" in os.environ:
        print("no device found", file=sys.stderr, flush=True)
        return EXIT_CODE
    while os.path.exists(os.environ.get("FAKE_WORKER_WAITS_WHILE_THERE_IS", "")):
        time.sleep(0.01)
    report(reports.Hello, jax_port=1)
    if "FAKE_WORKER_DOES_NOT_FIT" in os.environ:
        report(reports.Failure, message="the mesh needs 8 devices", traceback="", is_final=True)
        return 1
    setup = encoding.decode_to_worker(socket.recv())
    report(reports.Progress, message="loading weights 50 %")
    device = new_device(setup, report)
    report(reports.Progress, message="")
    plan = MemoryPlan(
        pages=PAGES,
        train_tokens=setup.train_tokens or 2048,
        decode_rows=setup.decode_rows,
        adapter_slots=setup.adapter_slots,
    )
    report(reports.Ready, plan=plan, device="1 x fake")
    print(f"worker {origin['process']} is ready", flush=True)
    while True:
        envelope = encoding.decode_to_worker(socket.recv())
        command = envelope.command
        if isinstance(command, commands.Shutdown):
            report(reports.Reply, sequence=envelope.sequence)
            return 0
        seed = command.source.seed if command.name == "create_adapter" else None
        if seed in fails:
            if seed == RAISE:
                report(reports.Failure, message="ValueError: on purpose", traceback="Traceback ...")
                return 1
            if seed == EXIT:
                print("the last words", file=sys.stderr, flush=True)
                return EXIT_CODE
            if seed == HANG:
                time.sleep(3600)
        arrays, metrics = device.execute(command)
        if origin["process"]:
            arrays, metrics = {}, {}
        report(reports.Reply, sequence=envelope.sequence, arrays=arrays, metrics=metrics)
        if isinstance(command, commands.Compile):
            report(reports.Compiled, number=command.number)


if __name__ == "__main__":
    sys.exit(main())
