"""Finds variables of the environment that begin like those of options and are of none: none reads them."""

import difflib
from collections.abc import Iterable, Iterator
from typing import Any

from spmd_tx.errors import StartError

BEGINNING = "SPMD_TX_"
SECRET = "SPMD_TX_SECRET"  # read by the parts that need it, so that no command line shows it


def check_variables(program: Any, environment: Iterable[str]) -> None:
    """Raise StartError for a name that begins like an option's and is of no command of the program."""
    known = {SECRET, *_variables(program)}
    for name in sorted(environment):
        if name.startswith(BEGINNING) and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"; perhaps {near[0]} is meant" if near else ""
            raise StartError(
                f"{name} is set in the environment, and no option has that variable{meant}. Unset it "
                "(Kubernetes sets some for a service called spmd-tx, unless enableServiceLinks is false)"
            )


def _variables(command: Any) -> Iterator[str]:
    """The variables of a command of click, and of those below it."""
    for parameter in command.params:
        variables = parameter.envvar or ()
        yield from (variables,) if isinstance(variables, str) else variables
    for below in getattr(command, "commands", {}).values():
        yield from _variables(below)
