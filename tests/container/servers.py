"""A server in a container."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.container.rootless import MINUTES, User
from tests.support.ports import free_port

MODEL = "/data/model"


@contextmanager
def with_model(user: User, image: str) -> Iterator[str]:
    """A volume with a tiny model at MODEL."""
    with user.volume("spmd-tx-data-of-tests") as volume:
        user.podman("run", "--rm", "-v", f"{volume}:/data", image, "make-model", MODEL)
        yield volume


def new_key(user: User, image: str, volume: str) -> str:
    """Make a key before the server starts, as the quick start does."""
    return user.podman("run", "--rm", "-v", f"{volume}:/data", image, "keys", "create", "--owner", "me")


@contextmanager
def served(user: User, image: str, volume: str, *options: str) -> Iterator[tuple[str, str]]:
    """A server in a container of the image: its name and the server's URL. SIGTERM ends it, with code 0.

    ``options``: of ``podman run``.
    """
    port, name = free_port(), "spmd-tx-server-of-tests"
    place = ["--publish", f"127.0.0.1:{port}:8000", "--volume", f"{volume}:/data", *options]
    serve = ["serve", "--base-model", MODEL, "--host", "0.0.0.0"]
    user.podman("run", "--detach", "--name", name, *place, image, *serve)
    try:
        wait_until_ready(user, name, url := f"http://127.0.0.1:{port}")
        yield name, url
        user.podman("stop", "--time", 120, name)
        assert user.podman("inspect", name, "--format", "{{.State.ExitCode}}") == "0"
    finally:
        print(user.podman("logs", name))
        user.podman("rm", "--force", name)


def wait_until_ready(user: User, name: str, url: str) -> None:
    """Wait for a server in a container. Raises AssertionError if either ends or takes minutes."""
    deadline = time.monotonic() + 5 * MINUTES
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert user.podman("inspect", name, "--format", "{{.State.Status}}") == "running"
        time.sleep(0.2)
    raise AssertionError("it is not ready")
