"""Every route of the OpenAPI document is asked thousands of odd things by one tenant, beside another one."""

import asyncio
import json
import os
import re
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from spmd_tx.coordinator.storage.database import in_database
from spmd_tx.coordinator.tenancy import keys
from spmd_tx.coordinator.tenancy.keys import NewKeyOptions
from spmd_tx.demo import tiny_model
from tests.support.ports import free_port

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(3600)]

SCHEMATHESIS = Path(__file__).parents[2] / ".venv-fuzz" / "bin" / "schemathesis"
SCRIPT = Path(__file__).parents[1] / "coordinator" / "server" / "serve_with_fake_workers.py"
SECONDS = int(os.environ.get("FUZZ_SECONDS", "600"))

# A key that revokes itself ends the test; the other one waits for as long as it is told to.
LEFT_OUT = ("/api/v1/auth/apikey/me", "/api/v1/retrieve_futures")


@dataclass(frozen=True)
class Server:
    url: str
    log: Path
    tokens: dict[str, str]  # by owner

    def client(self, owner: str) -> httpx.Client:
        return httpx.Client(
            base_url=f"{self.url}/api/v1/", headers={"x-api-key": self.tokens[owner]}, timeout=60
        )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    tokens = {
        owner: asyncio.run(
            in_database(None, tmp_path, lambda db, owner=owner: keys.create(db, NewKeyOptions(owner)))
        )
        for owner in ("alice", "mallory")
    }
    port = free_port()
    options = {
        "base_model": str(tiny_model.write(tmp_path / "model")),
        "served_model_name": "tiny",
        "data_dir": str(tmp_path),
        "port": port,
        "max_context_length": 256,
    }
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(options)], stdout=subprocess.PIPE, stderr=file, text=True
        )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("ready: "), log.read_text()
    yield Server(f"http://127.0.0.1:{port}", log, {owner: new.token for owner, new in tokens.items()})
    process.kill()
    process.wait()
    process.stdout.close()


def test_no_route_fails_hangs_or_tells_of_others(server: Server, tmp_path: Path) -> None:
    if not SCHEMATHESIS.exists():
        pytest.skip("schemathesis is not installed; run `make fuzz`")
    with server.client("alice") as alice:
        body = {"display_name": "alice-was-here", "project_id": "alice-project"}
        session_id = alice.post("create_session", json=body).json()["session_id"]
        answers = tmp_path / "answers.ndjson"
        done = subprocess.run(  # it keeps a cache in its working directory
            _command(server, answers), capture_output=True, text=True, check=False, cwd=tmp_path
        )
        print(done.stdout[-3000:])
        log = server.log.read_text()
        assert not re.findall(r"ERROR .*", log)[:3]
        assert done.returncode == 0, done.stdout[-10_000:]
        told = _bodies(answers)
        assert '"status":"accepted"' in told  # what telemetry is answered: the bodies are read as they were
        for secret in (session_id, *body.values(), server.tokens["alice"]):
            assert secret not in told
        found = alice.get(f"sessions/{session_id}").json()
        assert found["display_name"] == "alice-was-here"
    with server.client("mallory") as mallory:
        assert session_id not in mallory.get("sessions", params={"limit": 1000}).text


def _bodies(answers: Path) -> str:
    """All that was answered, end to end."""
    encoded = re.findall(r'"\$base64": ?"([^"]*)"', answers.read_text(errors="replace"))
    return "\n".join(b64decode(body).decode(errors="replace") for body in encoded)


def _command(server: Server, answers: Path) -> list[str]:
    """No answer of 500 and above, and none that takes more than a long poll."""
    command = [str(SCHEMATHESIS), "run", f"{server.url}/schema/openapi.json", "--no-color"]
    command += ["--header", f"X-API-Key: {server.tokens['mallory']}", "--checks", "not_a_server_error"]
    command += ["--phases", "coverage,fuzzing", "--continue-on-failure", "--warnings", "off"]
    command += ["--max-examples", "100", "--max-time", str(SECONDS), "--request-timeout", "45"]
    command += ["--report-ndjson-path", str(answers)]
    for path in LEFT_OUT:
        command += ["--exclude-path", path]
    return command
