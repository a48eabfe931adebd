"""Which environment variables processes are given that this one starts. Pure."""

import re
from collections.abc import Mapping

# What an interpreter needs to be the same one as this.
OF_PYTHON = ("PATH", "HOME", "LANG", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
PREFIXES_OF_PYTHON = ("PYTHON", "LC_")
PREFIXES_OF_JAX = ("JAX_", "XLA_")
# Libraries take a thread and its memory for each processor of the machine otherwise.
FRUGAL = {
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
}
# What the server may need for its database, its model and its object store, and a worker never.
SECRETS = re.compile(
    r"(^|_)(SECRET|PASSWORD|PASSWD|TOKEN|CREDENTIALS?|API_KEY|ACCESS_KEY)($|_)"
    r"|DATABASE_URL$|^(AWS|AZURE)_|^PGPASS"
)


def of_worker(environment: Mapping[str, str]) -> dict[str, str]:
    """Of a worker: what libraries and drivers are told, without the secrets of the server."""
    return {name: value for name, value in environment.items() if SECRETS.search(name) is None}


def of_foreign_code(environment: Mapping[str, str]) -> dict[str, str]:
    """Of a child that runs a library on what a client has sent: nothing that it does not need."""
    return _starting_with(environment, PREFIXES_OF_PYTHON) | FRUGAL


def of_losses(environment: Mapping[str, str]) -> dict[str, str]:
    """Of a process that runs clients' losses with JAX: on the host's processor, with the worker's flags."""
    return _starting_with(environment, PREFIXES_OF_PYTHON + PREFIXES_OF_JAX) | {"JAX_PLATFORMS": "cpu"}


def _starting_with(environment: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
    return {
        name: value for name, value in environment.items() if name in OF_PYTHON or name.startswith(prefixes)
    }
