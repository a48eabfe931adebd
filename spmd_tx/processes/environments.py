"""Chooses the environment variables of child processes, and those that keep proxies out of them. Pure."""

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

THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
EXCEPTIONS = ("no_proxy", "NO_PROXY")  # libraries read either, or both


def of_worker(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a worker's environment: everything but the server's secrets."""
    return {name: value for name, value in environment.items() if SECRETS.search(name) is None}


def of_foreign_code(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child that runs a library on a client's input: only what Python needs."""
    return _starting_with(environment, PREFIXES_OF_PYTHON) | FRUGAL


def of_losses(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process for custom losses: JAX on the CPU, with the worker's flags."""
    return _starting_with(environment, PREFIXES_OF_PYTHON + PREFIXES_OF_JAX) | {"JAX_PLATFORMS": "cpu"}


def past_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which no library asks a proxy for this machine; none if there is no proxy."""
    if not proxies(environment):
        return {}
    excepted = [name for key in EXCEPTIONS for name in environment.get(key, "").split(",") if name.strip()]
    return dict.fromkeys(EXCEPTIONS, ",".join(dict.fromkeys([*map(str.strip, excepted), *THIS_MACHINE])))


def proxies(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that name proxies, such as http_proxy and ALL_PROXY."""
    return [name for name in environment if name.lower().endswith("_proxy") and name not in EXCEPTIONS]


def _starting_with(environment: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
    return {
        name: value for name, value in environment.items() if name in OF_PYTHON or name.startswith(prefixes)
    }
