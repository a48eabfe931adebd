import asyncio
import os
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from spmd_tx.coordinator.http.security.tls import context_of
from spmd_tx.coordinator.http.uvicorn_server import HttpServer
from spmd_tx.errors import StartError
from tests.coordinator.http.real_server import SECONDS, connections, sqlite_only  # noqa: F401

# Of localhost, for a hundred years, by an authority of its own
FOLDER = Path(__file__).parents[3] / "golden" / "tls"
AUTHORITY, CERTIFICATE, KEY = (FOLDER / f"{name}.pem" for name in ("authority", "certificate", "key"))
ASK = """
import sys, tinker
client = tinker.RestClient(base_url=sys.argv[1], api_key="tml-a")
print(client.get_server_capabilities().result(30).supported_models[0].model_name)
"""


@pytest.fixture
async def url(app, connections):  # noqa: F811
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        server = HttpServer(app, listening, connections, context_of(CERTIFICATE, KEY))
        running = asyncio.create_task(server.run())
        yield f"https://localhost:{server.port}"
        server.stop()
        await running


@sqlite_only
async def test_clients_that_know_the_certificate_are_answered_and_nobody_else(url, services):
    known = ssl.create_default_context(cafile=AUTHORITY)
    async with httpx.AsyncClient(verify=known, timeout=SECONDS) as client:
        assert (await client.get(f"{url}/api/v1/healthz")).status_code == 200
        with pytest.raises(httpx.HTTPError):
            await client.get(f"{url.replace('https', 'http')}/api/v1/healthz")
    async with httpx.AsyncClient(timeout=SECONDS) as stranger:
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            await stranger.get(f"{url}/api/v1/healthz")


@sqlite_only
async def test_the_sdk_and_the_commands_read_the_file_of_certificates_of_the_environment(url, services):
    environment = os.environ | {"SSL_CERT_FILE": str(AUTHORITY)}
    for command, expected in (
        ([sys.executable, "-c", ASK, url], "Qwen/Qwen3-0.6B"),
        ([sys.executable, "-m", "spmd_tx.cli", "runs", "list", "--url", url], "there are no runs yet"),
    ):
        told = await asyncio.to_thread(
            subprocess.run, command, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
        assert told.stdout.strip() == expected, told.stderr


@pytest.mark.parametrize(
    "certificate, key, message",
    [
        (None, KEY, r"--tls-key is .*key\.pem, and there is no --tls-cert"),
        (CERTIFICATE, FOLDER / "none.pem", "cannot read --tls-cert .* No such file"),
        (CERTIFICATE, None, "no PEM files of a certificate and its key"),
        (KEY, KEY, "no PEM files of a certificate and its key"),
    ],
)
def test_files_that_cannot_be_used_are_named(certificate, key, message):
    with pytest.raises(StartError, match=message):
        context_of(certificate, key)


def test_a_key_with_a_password_is_refused(tmp_path):
    sealed = tmp_path / "key.pem"
    lines = KEY.read_text().splitlines()
    header = [
        "-----BEGIN EC PRIVATE KEY-----",
        "Proc-Type: 4,ENCRYPTED",
        f"DEK-Info: AES-128-CBC,{'0' * 32}",
        "",
    ]
    sealed.write_text("\n".join([*header, *lines[1:-1], "-----END EC PRIVATE KEY-----"]))
    with pytest.raises(StartError, match="needs a password"):
        context_of(CERTIFICATE, sealed)


def test_without_a_certificate_nothing_is_encrypted():
    assert context_of(None, None) is None
