"""The container image, built without privileges; then a client trains with a server in it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from spmd_tx.coordinator.server.preflight import free_port

pytestmark = [pytest.mark.container, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[2]
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"  # of this machine, which may trust more than the image
NEEDED = ("buildah", "mmdebstrap")
MINUTES = 60.0
EXTRAS = os.environ.get("CONTAINER_EXTRAS", "")  # such as tpu: the image then computes on CPUs without TPUs


def build(*arguments: object) -> str:
    """Run buildah, without the need for namespaces of networks and control groups of its own."""
    return subprocess.run(
        ["buildah", *map(str, arguments)], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Debian with its own Python, unless CONTAINER_BASE names an image."""
    if "CONTAINER_BASE" in os.environ:
        yield os.environ["CONTAINER_BASE"]
        return
    archive = tmp_path_factory.mktemp("base") / "base.tar"
    packages = "--include=python3,python3-venv,ca-certificates"
    subprocess.run(["mmdebstrap", "--variant=minbase", packages, "bookworm", archive], check=True)
    container = build("from", "scratch")
    build("add", container, archive, "/")
    archive.unlink()
    yield build("commit", "--rm", container, "localhost/python-of-debian")
    build("rmi", "localhost/python-of-debian")


@pytest.fixture(scope="module")
def image(base):
    trusted = ["--volume", f"{CERTIFICATES}:{CERTIFICATES}:ro", "--env", f"PIP_CERT={CERTIFICATES}"]
    name = "localhost/spmd-tx-of-tests"
    chosen = ["--build-arg", f"BASE={base}", "--build-arg", f"EXTRAS={EXTRAS}"]
    build("build", "--isolation", "chroot", *chosen, *trusted, "--tag", name, ROOT)
    yield name
    build("rmi", name)


@pytest.fixture
def container(image):
    container = build("from", image)
    yield container
    build("rm", container)


@pytest.mark.skipif(
    any(shutil.which(name) is None for name in NEEDED), reason=f"needs {' and '.join(NEEDED)}"
)
def test_a_server_in_a_container_of_the_image_trains_for_a_client(container, tmp_path):
    inside = ["buildah", "run", "--isolation", "chroot", container]
    told = subprocess.run(
        [*inside, "sh", "-c", "id -u; spmd-tx version"], capture_output=True, text=True, check=True
    )
    user, version = told.stdout.splitlines()
    assert user == "1000"
    assert version.startswith("spmd-tx ")

    subprocess.run([*inside, "spmd-tx", "make-model", "/tmp/model"], check=True)
    url = f"http://127.0.0.1:{(port := free_port())}"
    serve = ["spmd-tx", "serve", "--base-model", "/tmp/model", "--port", str(port)]
    (tmp_path / "data.jsonl").write_text('{"prompt": "Where?", "completion": " Here."}\n')
    with subprocess.Popen([*inside, *serve], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == f"ready: {url}\n"
            # The files of the model, with which the client makes tokens, are in the container alone.
            train = [
                "spmd-tx",
                "train",
                "sl",
                "/tmp/data.jsonl",
                "--steps",
                "3",
                "--url",
                url,
                "--out",
                "/data/run",
            ]
            build("copy", "--chown", "1000:1000", container, tmp_path / "data.jsonl", "/tmp/")
            trained = subprocess.run([*inside, *train], capture_output=True, text=True, timeout=MINUTES * 5)
            assert "weights: tinker://" in trained.stdout, trained.stderr
        finally:
            server.terminate()
