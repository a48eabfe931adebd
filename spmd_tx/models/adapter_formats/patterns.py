"""Matches regular expressions of clients with names of modules, in a time that no expression can blow up.

Python's own matcher may need time exponential in a name's length. RE2's takes time linear in it, and refuses
what it could not match so: references to groups, and what looks ahead or behind.
"""

from typing import Any

from spmd_tx.errors import InvalidRequest

MOST_CHARACTERS = 2000
MOST_BYTES = 1 << 20  # of memory for one expression
SHOWN = 200  # characters of an expression


class Pattern:
    """Holds one expression."""

    def __init__(self, expression: str) -> None:
        """Raise InvalidRequest for an expression that is not read."""
        if len(expression) > MOST_CHARACTERS:
            raise _not_read(expression, f"it has more than {MOST_CHARACTERS} characters")
        self._whole = _compiled(expression)
        self._ending = _compiled(rf"(?:.*\.)?(?:{expression})")

    def matches(self, name: str) -> bool:
        """Whether it matches the whole name."""
        return self._whole.fullmatch(name) is not None

    def matches_end(self, name: str) -> bool:
        """Whether it matches the name from its beginning, or from behind a dot, to its end."""
        return self._ending.fullmatch(name) is not None


def _compiled(expression: str) -> Any:
    import re2  # which few servers need

    options = re2.Options()
    options.log_errors, options.max_mem = False, MOST_BYTES
    try:
        return re2.compile(expression, options)
    except re2.error as error:
        raise _not_read(expression, error.args[0].decode(errors="replace")) from None


def _not_read(expression: str, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"the pattern {expression[:SHOWN]!r} is not read: {reason}; name modules, or use characters, "
        "classes, groups, alternatives and repetitions alone"
    )
