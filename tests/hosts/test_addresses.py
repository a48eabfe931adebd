"""Two hosts with real workers: over IPv6, by names with a dead address, with proxies that nobody answers."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from spmd_tx.demo import tiny_model
from tests.hosts.network import Network, obstacle

SECONDS = 240.0
PROXIES = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY"), "http://127.0.0.1:9")
PROGRAM = [sys.executable, "-m", "spmd_tx.cli"]
NAMED = ["unshare", "-u", "sh", "-c", 'hostname "$0"; exec "$@"']  # gives a host its name
NAMES = socket.gethostname(), "other-host"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def network() -> Iterator[Network]:
    problem = obstacle()
    if problem is not None:
        pytest.skip(problem)
    network = Network(len(NAMES))
    for host, name in enumerate(NAMES):
        network.name(host, name, network.address_6(host))
    yield network
    network.close()


class Started(NamedTuple):
    """Holds the server and the agent, and their log."""

    server: subprocess.Popen[bytes]
    agent: subprocess.Popen[bytes]
    log: Path

    def wait_for(self, pattern: str) -> str:
        until = time.monotonic() + SECONDS
        while (found := re.search(pattern, self.log.read_text(), re.M)) is None:
            assert time.monotonic() < until, self.log.read_text()[-5000:]
            time.sleep(0.1)
        return found[0]


@contextmanager
def started(folder: Path, network: Network, coordinator: str) -> Iterator[Started]:
    """Start a server with one worker on host 0, and an agent on host 1, which has another name."""
    secret = folder / "secret"
    secret.write_text("of the tests with two hosts")
    model = tiny_model.write(folder / "model")
    serve = ["serve", "--base-model", model, "--data-dir", folder / "data", "--port", "8000"]
    serve += ["--worker-host", "::", "--worker-port", "7000", "--warm-up", "off", "--num-processes", "2"]
    serve += ["--local-processes", "1", "--secret-file", secret]
    agent = ["worker", "--coordinator", coordinator, "--process-id", "1", "--secret-file", secret]
    log = folder / "log"
    with log.open("w") as file:
        processes = [
            subprocess.Popen(
                network.command(host, [*NAMED, NAMES[host], *PROGRAM, *command]),
                stdout=file,
                stderr=file,
                env=os.environ | PROXIES | {"JAX_PLATFORMS": "cpu"},
            )
            for host, command in enumerate((serve, agent))
        ]
        try:
            yield Started(*processes, log)
        finally:
            for process in processes:
                process.kill()
                process.wait()


@pytest.mark.parametrize(
    "coordinator, addresses",
    [
        ("[fd77::1]:7000", ()),
        ("head:7000", ("10.77.0.99", "fd77::1")),
        ("head:7000", ("fd77::99", "10.77.0.1")),
    ],
)
def test_hosts_find_each_other_at_the_address_that_answers(tmp_path, network, coordinator, addresses):
    network.name(1, "head", *addresses)
    with started(tmp_path, network, coordinator) as running:
        running.wait_for("^ready: ")
        running.server.send_signal(signal.SIGTERM)
        assert (running.server.wait(60), running.agent.wait(60)) == (0, 0)


def test_a_host_that_calls_itself_loopback_is_refused_with_the_remedy(tmp_path, network):
    network.name(0, NAMES[0], "127.0.1.1")
    with started(tmp_path, network, "[fd77::1]:7000") as running:
        assert running.server.wait(SECONDS) == 2
        refusal = running.wait_for("^spmd-tx: worker 0 on .*")
    assert f"the name of this host, {NAMES[0]}, stands for 127.0.1.1" in refusal
    assert "/etc/hosts" in refusal
