"""Makes consoles for tables, which are as wide as the terminal."""

import sys

from rich.console import Console

UNBOUNDED = 10_000  # columns, of an output that is no terminal


def console(is_error: bool = False) -> Console:
    """Make a console for this output. What is no terminal has lines of any length, so nothing is cut."""
    output = sys.stderr if is_error else sys.stdout
    is_terminal = output is not None and output.isatty()  # None: it was closed before the command began
    # Ids hold colons, and names of clients may hold anything.
    return Console(stderr=is_error, emoji=False, markup=False, width=None if is_terminal else UNBOUNDED)
