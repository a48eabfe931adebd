"""Runs a coordinator, agents and their workers, and restarts what was killed, like a service manager."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from spmd_tx.demo import tiny_model
from tests.chaos.proxy import Proxy
from tests.support import quick_compilation
from tests.support.mtp_models import make_drafts_right
from tests.support.ports import free_port
from tests.support.processes import command_line

HERE = Path(__file__).parent
COMPILED = HERE.parents[1] / ".cache" / "jax-chaos"
SPEC = tiny_model.Spec(n_heads=4, n_kv_heads=2, vocab_size=512, max_positions=64)
IMAGE_TOKENS = 16  # of the pool: fewer than those of the images that are used
SMALL = 32 * 32  # pixels of an image that becomes one token
SECRET = "of the crash tests"
RESTART_SECONDS = 0.1  # that the service manager takes
STOP_SECONDS = 60
LEAVING = 0, -signal.SIGKILL, -signal.SIGTERM  # exit codes; the last one before it knew the signal

COORDINATOR, AGENT, WORKER_0, WORKER_1 = "coordinator", "agent", "worker 0", "worker 1"
ROLES = COORDINATOR, AGENT, WORKER_0, WORKER_1
TEACHERS_WORKER = "worker of the teacher"  # where there is one
TEACHER = "teacher"  # its group, and the name of its model
SAMPLERS = "sampler 0", "sampler 1"  # agents of replicas, where there are some
SAMPLERS_WORKERS = tuple(f"worker of {agent}" for agent in SAMPLERS)
PARENTS = {
    WORKER_0: COORDINATOR,
    WORKER_1: AGENT,
    TEACHERS_WORKER: COORDINATOR,
    **dict(zip(SAMPLERS_WORKERS, SAMPLERS, strict=True)),
}
ROLLOUTS = "rollouts"  # the group whose replicas sample
REPLICAS = f"name={ROLLOUTS},role=sample,replicas={len(SAMPLERS)},kv_cache_tokens=2048"
POINTS_OF_SAMPLERS = "sampler"  # what the points of their workers begin with

# One compiled shape of every step, so that a worker that starts again is soon at work.
OPTIONS = {
    "served_model_name": "tiny",
    "num_processes": 2,
    "fully_sharded_data_parallel_size": 2,
    "train_tokens": 64,
    "decode_rows": 4,
    "batch_invariant": True,  # so that what is trained on samples is the same, too
    "max_lora_adapters": 5,
    "max_lora_rank": 8,
    "sampler_slots": 3,
    "warm_up": "off",
}


def keep_images_small(model: Path) -> None:
    """Have a model take small images as they are."""
    path = model / "preprocessor_config.json"
    processor = json.loads(path.read_text())
    processor["size"]["shortest_edge"] = SMALL
    path.write_text(json.dumps(processor))


@dataclass(frozen=True)
class Model:
    """Says what the first group serves."""

    spec: tiny_model.Spec = SPEC
    options: Mapping[str, object] = field(default_factory=dict)
    change: Callable[[Path], None] = lambda model: None  # once it is written


SEES = Model(
    replace(SPEC, family="qwen3_5", sees=True, max_positions=128),
    {"image_tokens": IMAGE_TOKENS},
    keep_images_small,
)
EXPECTS = Model(change=lambda model: make_drafts_right(model, "glm4_moe", SPEC))
PLAIN = Model()


class Cluster:
    """Holds what an operator runs; clients see ``url`` only."""

    def __init__(
        self,
        folder: Path,
        *,
        has_teacher: bool = False,
        has_samplers: bool = False,
        model: Model = PLAIN,
        **options: object,
    ) -> None:
        """``has_teacher`` adds a group of one worker with another model, from which clients sample.

        ``has_samplers`` adds replicas that sample what the first group trains.
        """
        self.folder, self.data_dir, self.points = folder, folder / "data", folder / "points"
        self.points.mkdir()
        self.data_dir.mkdir()
        share_compiled_programs(self.data_dir)
        port, worker_port = free_port(), free_port()
        self.clients, self.link = Proxy(port), Proxy(worker_port)
        self.url = f"http://127.0.0.1:{self.clients.port}"
        path = tiny_model.write(folder / "model", model.spec)
        model.change(path)
        if has_teacher:
            teacher = tiny_model.write(folder / TEACHER, replace(SPEC, n_layers=1), seed=5)
            pairs = f"name={TEACHER},base_model={teacher},served_model_name={TEACHER},role=sample"
            options |= {"group": f"{pairs},num_processes=1"}
        if has_samplers:
            share_compiled_programs(self.data_dir / "groups" / ROLLOUTS)
            options |= {"group": REPLICAS}
        (folder / "secret").write_text(SECRET)
        options = {
            "base_model": path,
            "data_dir": self.data_dir,
            "port": port,
            "worker_port": worker_port,
            "secret_file": folder / "secret",
            "local_processes": 1,
            **OPTIONS,
            **model.options,
            **options,
        }
        joins = {"coordinator": f"127.0.0.1:{self.link.port}", "secret_file": folder / "secret"}
        self._commands = {
            COORDINATOR: ["serve", *as_arguments(options)],
            AGENT: ["worker", *as_arguments(joins | {"process_id": 1})],
        }
        if has_samplers:
            arguments = as_arguments(joins | {"group": ROLLOUTS, "leave_seconds": 4})
            self._commands |= {agent: ["worker", *arguments] for agent in SAMPLERS}
        self.log = (folder / "log").open("w")
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()  # of the processes
        self._is_over = threading.Event()
        self._leaving: set[str] = set()  # roles that were asked to end
        self.exits: list[str] = []  # of processes that nobody killed
        self._keeper = threading.Thread(target=self._keep, daemon=True)

    def start(self) -> None:
        self._start_missing()
        self._keeper.start()

    def pid(self, role: str) -> int | None:
        """Return the id of a process that lives now."""
        parent = PARENTS.get(role)
        if parent is None:
            process = self._processes.get(role)
            return process.pid if process is not None and process.poll() is None else None
        parent_pid = self.pid(parent)
        model = str(self.folder / (TEACHER if role == TEACHERS_WORKER else "model"))
        try:
            children = psutil.Process(parent_pid).children() if parent_pid is not None else []
            return next((each.pid for each in children if model in command_line(each)), None)
        except psutil.Error:
            return None

    def kill(self, *roles: str) -> int:
        """Send SIGKILL; return to how many processes."""
        pids = [pid for role in roles if (pid := self.pid(role)) is not None]
        return sum(_kill(pid) for pid in pids)

    def let_leave(self, role: str) -> bool:
        """Send SIGTERM to an agent, as a spot host does; return whether it lived. It will start again."""
        pid = self.pid(role)
        if pid is not None:
            self._leaving.add(role)
            os.kill(pid, signal.SIGTERM)
        return pid is not None

    def check(self) -> None:
        """Assert that nothing has ended but what was killed."""
        assert not self.exits, self.exits

    def stop(self) -> dict[str, int]:
        """End everything in order; return the exit codes."""
        self._is_over.set()
        self._keeper.join()
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        return {role: process.wait(STOP_SECONDS) for role, process in self._processes.items()}

    def close(self) -> None:
        """Kill everything that is left of it."""
        self._is_over.set()
        self._keeper.join()
        for process in self._processes.values():
            process.kill()
            process.wait()
        self.clients.close()
        self.link.close()
        self.log.close()

    def _keep(self) -> None:
        while not self._is_over.wait(RESTART_SECONDS):
            self._start_missing()

    def _start_missing(self) -> None:
        for role, command in self._commands.items():
            process = self._processes.get(role)
            if process is not None and process.poll() is None:
                continue
            expected = LEAVING if role in self._leaving else (-signal.SIGKILL,)
            if process is not None and process.returncode not in expected:
                self.exits.append(f"{role} exited with code {process.returncode}")
            print(f"{time.time():.3f} starting {role}", file=self.log, flush=True)
            self._processes[role] = subprocess.Popen(
                [sys.executable, str(HERE / "faulty_server.py"), *command],
                stdout=self.log,
                stderr=self.log,
                env=environment(self.points, POINTS_OF_SAMPLERS if role in SAMPLERS else ""),
            )
            self._leaving.discard(role)


def share_compiled_programs(data_dir: Path) -> None:
    """Let every worker, in each of its lives, use the same compiled programs."""
    COMPILED.mkdir(parents=True, exist_ok=True)
    data_dir.mkdir(parents=True, exist_ok=True)
    (data_dir / "compilation_cache").symlink_to(COMPILED)


def environment(points: Path, name: str = "") -> dict[str, str]:
    """Return the environment of a cluster's processes; ``name``: what points of workers begin with."""
    ours = {
        "CHAOS_POINTS": str(points),
        "CHAOS_WORKER": name,
        # XLA's own caches would bring the data directory into the keys of the compiled programs.
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
    }
    # Two processes compile each program. To compare bits on a GPU, set it to 0: then all passes run.
    return quick_compilation.ENVIRONMENT | os.environ | ours


def as_arguments(options: Mapping[str, object]) -> list[str]:
    return [
        text
        for name, value in options.items()
        for text in ("--" + name.replace("_", "-"), *([] if value is True else [str(value)]))
    ]


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
