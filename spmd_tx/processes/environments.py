"""Chooses the environment variables that child processes get. Pure."""

import re
from collections.abc import Mapping

# What a child needs to run the same interpreter as this process.
OF_PYTHON = ("PATH", "HOME", "LANG", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
PREFIXES_OF_PYTHON = ("PYTHON", "LC_")
PREFIXES_OF_JAX = ("JAX_", "XLA_")
# Otherwise libraries start a thread, with its memory, for each processor of the machine.
FRUGAL = {
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
}
# What the server may need for its database, its model and its object store, but a worker never does.
SECRETS = re.compile(
    r"(^|_)(SECRET|PASSWORD|PASSWD|TOKEN|CREDENTIALS?|API_KEY|ACCESS_KEY)($|_)"
    r"|DATABASE_URL$|^(AWS|AZURE)_|^PGPASS"
)


def of_worker(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a worker's environment: everything but the server's secrets."""
    return {name: value for name, value in environment.items() if SECRETS.search(name) is None}


def of_foreign_code(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child that runs a library on a client's input: only what Python needs."""
    return _starting_with(environment, PREFIXES_OF_PYTHON) | FRUGAL


def of_losses(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process for custom losses: JAX on the CPU, with the worker's flags."""
    return _starting_with(environment, PREFIXES_OF_PYTHON + PREFIXES_OF_JAX) | {"JAX_PLATFORMS": "cpu"}


def _starting_with(environment: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
    return {
        name: value for name, value in environment.items() if name in OF_PYTHON or name.startswith(prefixes)
    }
