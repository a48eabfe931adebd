"""A worker process: joins the mesh, then runs the coordinator's commands until told to stop."""

import argparse
import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import TracebackType

import jax
import msgspec

from spmd_tx.errors import MeshError, SpmdTxError, StartError
from spmd_tx.open_telemetry import Seldom
from spmd_tx.protocol import addresses
from spmd_tx.protocol.reports import Compiled, Failure, Progress, Ready
from spmd_tx.protocol.secret import Keys, read_secret
from spmd_tx.protocol.setup import Setup
from spmd_tx.worker import mesh_address
from spmd_tx.worker.accelerator import has_nvidia_gpu, has_tpu, prepare_accelerator
from spmd_tx.worker.command_spans import open_command_spans
from spmd_tx.worker.engine import Engine, ReportAside
from spmd_tx.worker.heartbeat import Heartbeat
from spmd_tx.worker.inbox import Inbox
from spmd_tx.worker.loop import Loop
from spmd_tx.worker.memory.allocator import keep_free_memory
from spmd_tx.worker.programs.compiled import Programs

HELLO_SECONDS = 120.0  # for the coordinator to answer; it waits for process 0
HEARTBEAT_SECONDS = 20  # silence after which jax.distributed ends all processes

# In errors of collectives whose peer process is gone.
PEER_IS_GONE = (
    "Gloo",
    "NCCL",
    "nccl",
    "Connection closed by peer",
    "Connection reset by peer",
    "coordination service",
    "heartbeat timeout",
    "Barrier timed out",
)


StartEngine = Callable[[Setup, Programs, Callable[[str], None], ReportAside], Engine]


def main(arguments: Sequence[str], start_engine: StartEngine) -> int:
    """Run one worker and return its exit code. An exception is reported and ends the process with 1."""
    keep_free_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the coordinator, which then ends its workers
    log = logging.StreamHandler()
    log.addFilter(Seldom())
    logging.basicConfig(handlers=[log], level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    options = _parse(arguments)
    secret = read_secret(None)
    assert secret is not None, "the agent hands the secret over"
    inbox = Inbox(options.coordinator, options.process_id, options.generation, Keys.of(secret))
    sys.excepthook = partial(_fail, inbox)
    heart: Heartbeat

    def settled(number: int, seconds: float, error: str | None) -> None:
        heart.tell(Compiled, number=number, seconds=seconds, error=error)

    programs = Programs(lambda message: inbox.report(Progress, message=message), settled)
    heart = Heartbeat(inbox, programs.state if options.process_id == 0 else None)
    with heart:
        _work(inbox, options, start_engine, programs)
    has_ended = programs.stop()
    inbox.close()
    if not has_ended:
        _leave()
    return 0


def _work(inbox: Inbox, options: argparse.Namespace, start_engine: StartEngine, programs: Programs) -> None:
    is_leader = options.process_id == 0
    setup = inbox.hello(HELLO_SECONDS, jax_port=addresses.free_port("") if is_leader else 0)
    if options.model_dir is not None:
        setup = msgspec.structs.replace(setup, model_dir=options.model_dir)

    def progress(message: str) -> None:
        inbox.report(Progress, message=message)

    spans = open_command_spans(os.environ, options.process_id, options.generation)
    configure_jax(setup, options.devices)
    setup = prepare_accelerator(setup, options.device_ids, progress)
    if setup.num_processes > 1:
        _join(setup, options, progress)

    engine = start_engine(setup, programs, progress, inbox.report_aside)
    inbox.report(
        Ready,
        device=engine.device,
        plan=engine.plan,
        kernels=programs.kernels,
        compiles_aside=programs.compiles_aside,
        compile_threads=programs.compile_threads,
        numerics=engine.numerics,
    )
    with spans or nullcontext():
        Loop(engine.execute, inbox, is_leader, programs.at_work, spans).run()


def configure_jax(setup: Setup, devices: int) -> None:
    """Set what must be set before JAX looks at the devices."""
    jax.config.update("jax_num_cpu_devices", devices)  # no effect on accelerators
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_compilation_cache_dir", setup.compilation_cache)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "")  # we choose the folder (accelerator.py)
    # For fast restarts, cache every program, even one that is small or was compiled quickly.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _join(setup: Setup, options: argparse.Namespace, progress: Callable[[str], None]) -> None:
    """Join the mesh. When one of its processes ends, all of them end soon."""
    service = setup.jax_coordinator
    progress(f"waiting for the other workers at {service}")
    if not (has_nvidia_gpu() or has_tpu()):
        mesh_address.check_own_name(service)
    if options.process_id != 0:
        mesh_address.await_service(service)
    if mesh_address.is_local(service):
        mesh_address.keep_nccl_local()
    mesh_address.keep_direct(service)
    jax.config.update("jax_check_proxy_envs", False)  # they do not count
    jax.distributed.initialize(
        service,
        coordinator_bind_address=mesh_address.bind_address(service) if options.process_id == 0 else None,
        num_processes=setup.num_processes,
        process_id=options.process_id,
        local_device_ids=options.device_ids,
        cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
    )
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # undo jax.distributed's handler, which delays it
    if jax.local_device_count() != options.devices:
        raise StartError(
            f"worker {options.process_id} on {socket.gethostname()} has {jax.local_device_count()} devices, "
            f"but the mesh fsdp {setup.fsdp} x ep {setup.ep} x tp {setup.tp} has {options.devices} of each "
            "process; change the parallel sizes or --num-processes"
        )


def _leave() -> None:
    """Exit while a program is being compiled, during which a normal exit of Python aborts."""
    jax.distributed.shutdown()  # with all processes; does nothing if there is only one
    sys.stderr.flush()
    os._exit(0)


def _fail(inbox: Inbox, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report an uncaught exception and exit at once, because collectives with other workers may hang."""
    if isinstance(error, SpmdTxError):
        message = story = str(error)
    else:
        message = f"{kind.__name__}: {error}"
        story = "".join(traceback.format_exception(kind, error, trace))
    print(story, file=sys.stderr, flush=True)
    of_a_collective = isinstance(error, jax.errors.JaxRuntimeError) and any(
        words in message for words in PEER_IS_GONE
    )
    inbox.report(
        Failure,
        message=message,
        traceback=story,
        sequence=inbox.executing,
        is_consequence=of_a_collective or isinstance(error, MeshError),
        is_final=isinstance(error, StartError),
    )
    inbox.close()
    os._exit(1)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="spmd_tx.worker.main", description=__doc__)
    parser.add_argument("--coordinator", required=True, help="ZeroMQ address, tcp://HOST:PORT")
    parser.add_argument("--process-id", type=int, required=True, help="0 .. number of processes - 1")
    parser.add_argument("--generation", type=int, required=True, help="incarnation of the worker group")
    parser.add_argument(
        "--devices", type=int, required=True, help="devices of this process; on CPUs they are simulated"
    )
    parser.add_argument("--device-ids", type=_numbers, help="those of this host that it takes; default: all")
    parser.add_argument("--model-dir", help="where this host has the base model; default: the coordinator's")
    return parser.parse_args(arguments)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Engine.start))
