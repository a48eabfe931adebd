"""Runs a server with four workers on four hosts, each with its agent, as launch/multinode.sh does."""

import signal
import subprocess
import sys
from pathlib import Path

from spmd_tx.demo import tiny_model
from tests.chaos.cluster import HERE, OPTIONS, SPEC, as_arguments, environment, share_compiled_programs
from tests.hosts.network import Network

HOSTS = 4
PORT, WORKER_PORT = 8000, 7000
MESH = {"num_processes": HOSTS, "fully_sharded_data_parallel_size": 2, "tensor_parallel_size": 2}
STOP_SECONDS = 60


class HostCluster:
    """Holds the processes; the coordinator and worker 0 are on host 0."""

    def __init__(self, folder: Path, network: Network) -> None:
        self.folder, self.data_dir = folder, folder / "data"
        self.data_dir.mkdir(parents=True)
        share_compiled_programs(self.data_dir)
        self.url = f"http://127.0.0.1:{PORT}"
        self._log = (folder / "log").open("w")
        (folder / "secret").write_text("of the tests with hosts")
        model = tiny_model.write(folder / "model", SPEC)
        address = network.address(0)
        serve = {
            **OPTIONS,
            **MESH,
            "base_model": model,
            "data_dir": self.data_dir,
            "port": PORT,
            "worker_host": address,
            "worker_port": WORKER_PORT,
            "secret_file": folder / "secret",
            "local_processes": 1,
            "snapshot_seconds": 1,
        }
        agent = {"coordinator": f"{address}:{WORKER_PORT}", "secret_file": folder / "secret"}
        commands = [["serve", *as_arguments(serve)]]
        commands += [["worker", *as_arguments(agent | {"process_id": host})] for host in range(1, HOSTS)]
        program = [sys.executable, str(HERE / "faulty_server.py")]
        self._processes = [
            subprocess.Popen(
                network.command(host, [*program, *command]),
                stdout=self._log,
                stderr=self._log,
                env=environment(folder / "no points"),
            )
            for host, command in enumerate(commands)
        ]

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def check(self) -> None:
        """Assert that the server and all agents live."""
        codes = [process.poll() for process in self._processes]
        assert codes == [None] * HOSTS, f"exit codes {codes}"

    def stop(self) -> list[int]:
        """End the server in order, and the agents with it; return the exit codes."""
        self._processes[0].send_signal(signal.SIGTERM)
        return [process.wait(STOP_SECONDS) for process in self._processes]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._log.close()
