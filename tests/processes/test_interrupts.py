"""Ctrl-C while the command line imports, while it starts a server, and while it waits for one."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest

COMMAND = [sys.executable, "-m", "spmd_tx.cli"]
INTERRUPTING = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"


@pytest.fixture(autouse=True)
def _interrupts_end_commands():
    """Commands inherit whether SIGINT is ignored, and whoever has run before may have had it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextmanager
def silent_listener():
    """Yield a socket that accepts and never answers, and its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening, f"http://127.0.0.1:{listening.getsockname()[1]}"


def ended(listening, command, number, **variables):
    """The exit code and the words of a command that gets a signal once it has connected."""
    process = subprocess.Popen(
        [*COMMAND, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | variables,
    )
    listening.settimeout(60)
    connection, _ = listening.accept()
    with connection:
        process.send_signal(number)
        words, _ = process.communicate(timeout=60)
    return process.returncode, words


@pytest.mark.parametrize(
    "module, arguments",
    [
        ("typer", ["version"]),
        ("msgspec", ["serve", "--base-model", "m"]),
        ("uvloop", ["serve", "--base-model", "m"]),
        ("zmq", ["worker", "--coordinator", "a:1", "--process-id", "0"]),
    ],
)
def test_an_import_is_ended_without_a_traceback(tmp_path, module, arguments):
    (tmp_path / f"{module}.py").write_text(INTERRUPTING)
    done = subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_server_that_starts_ends_at_once_whatever_it_waits_for(tmp_path, number):
    with silent_listener() as (hub, url):
        serve = ["serve", "--base-model", "a/model", "--port", "0", "--data-dir", str(tmp_path / "data")]
        code, words = ended(hub, serve, number, HF_ENDPOINT=url, HF_HOME=str(tmp_path))
    assert code == 0
    assert words.endswith("INFO ended by a signal before it was ready\n")
    assert "Traceback" not in words


def test_a_command_that_waits_for_a_server_ends_without_a_traceback():
    with silent_listener() as (server, url):
        assert ended(server, ["runs", "list", "--url", url], signal.SIGINT) == (130, "")
