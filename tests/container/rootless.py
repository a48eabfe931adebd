"""A user without privileges, who builds images and runs containers with podman."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAME = "spmd-tx-of-tests"  # of the user that root makes
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"  # of this machine, which may trust more than the image
BASE = "localhost/python-of-debian"
MINUTES = 60.0  # seconds
HYBRID = Path("/sys/fs/cgroup/unified")  # control groups of both versions at once, which crun refuses
RUNTIME = "runc" if HYBRID.is_dir() else "crun"
NEEDED = ("podman", "buildah", "mmdebstrap", "newuidmap", "slirp4netns", RUNTIME)


class User:
    """Runs commands of a user, who has nothing but ranges of ids in ``/etc/subuid`` and ``/etc/subgid``."""

    def __init__(self, prefix: Sequence[str]) -> None:
        self.prefix = prefix

    def ended(
        self, *arguments: object, stdin: Path | None = None, seconds: float = 50 * MINUTES
    ) -> subprocess.CompletedProcess[str]:
        """Run podman to its end, with or without success."""
        with (stdin or Path(os.devnull)).open("rb") as given:
            command = [*self.prefix, "podman", *map(str, arguments)]
            return subprocess.run(command, stdin=given, capture_output=True, text=True, timeout=seconds)

    def podman(self, *arguments: object, stdin: Path | None = None) -> str:
        """Return what podman prints. Raises AssertionError with all that it has said, if it fails."""
        done = self.ended(*arguments, stdin=stdin)
        assert done.returncode == 0, f"{done.args}\n{done.stdout}{done.stderr}"
        return done.stdout.strip()

    @contextmanager
    def base(self, folder: Path) -> Iterator[str]:
        """Debian with its own Python, for machines that no registry serves; or what CONTAINER_BASE names."""
        if "CONTAINER_BASE" in os.environ:
            yield os.environ["CONTAINER_BASE"]
            return
        archive = folder / "base.tar"
        packages = "--include=python3,python3-venv,ca-certificates"
        subprocess.run(
            ["mmdebstrap", "--quiet", "--variant=minbase", packages, "bookworm", archive], check=True
        )
        self.podman("import", "-", BASE, stdin=archive)
        archive.unlink()
        yield BASE
        self.podman("rmi", BASE)

    @contextmanager
    def image(self, base: str, extras: str) -> Iterator[str]:
        """The image of the Dockerfile with these extras, as the quick start builds it."""
        name = f"localhost/spmd-tx-{extras or 'cpu'}-of-tests"
        trusted = ["--volume", f"{CERTIFICATES}:{CERTIFICATES}:ro", "--env", f"PIP_CERT={CERTIFICATES}"]
        chosen = ["--build-arg", f"BASE={base}", "--build-arg", f"EXTRAS={extras}"]
        self.podman("build", "--tag", name, *chosen, *trusted, ROOT)
        size = int(self.podman("image", "inspect", name, "--format", "{{.Size}}"))
        print(f"\n{name}: {size / 1e9:.2f} GB")
        yield name
        self.podman("rmi", "--force", name)
        self.podman("image", "prune", "--force")  # what was made on the way

    @contextmanager
    def volume(self, name: str) -> Iterator[str]:
        """A volume, which no container has used before."""
        self.podman("volume", "create", name)
        yield name
        self.podman("volume", "rm", "--force", name)


@contextmanager
def rootless() -> Iterator[User]:
    """Who runs the tests; if that is root, a user who is made for them, and who is removed again."""
    if os.geteuid() != 0:
        yield User([])
        return
    subprocess.run(["useradd", "--create-home", NAME], check=True)
    identifier = subprocess.run(["id", "-u", NAME], check=True, capture_output=True, text=True).stdout.strip()
    runtime = Path(f"/run/user/{identifier}")
    try:
        subprocess.run(["install", "-d", "-m", "700", "-o", NAME, runtime], check=True)
        become = ["setpriv", "--reuid", NAME, "--regid", NAME, "--init-groups", "--reset-env"]
        place = [
            f"--chdir=/home/{NAME}",
            f"HOME=/home/{NAME}",
            f"XDG_RUNTIME_DIR={runtime}",
            "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
        ]
        user = User([*become, "env", *place])
        configure(user)
        yield user
        user.podman("system", "reset", "--force")
        user.podman("system", "migrate")  # ends the process that holds the namespaces of the user
    finally:
        subprocess.run(["userdel", "--remove", "--force", NAME], check=True)
        subprocess.run(["rm", "-rf", runtime], check=True)


def configure(user: User) -> None:
    """What the quick start names for machines without the usual: a storage that shares layers, and runc."""
    files = {"storage": '[storage]\ndriver = "overlay"'}
    if HYBRID.is_dir():
        files["containers"] = '[engine]\nruntime = "runc"'
    for name, text in files.items():
        script = f"mkdir -p ~/.config/containers && cat > ~/.config/containers/{name}.conf"
        subprocess.run([*user.prefix, "sh", "-c", script], input=text.encode(), check=True)
