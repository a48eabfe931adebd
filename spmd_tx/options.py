"""What the declaration of an option says beside its type and default: its help, its values, who takes it."""

import inspect
import typing
from collections.abc import Iterator
from itertools import chain
from typing import Annotated, Any, Literal, NamedTuple

from spmd_tx.byte_sizes import parse_size
from spmd_tx.errors import StartError
from spmd_tx.protocol.addresses import HIGHEST_PORT

MANY = 2**31 - 1  # the most that a number can be; of seconds these are 68 years
AUTO = "auto"


class Heading(NamedTuple):
    """Begins a group of options in ``--help``."""

    text: str


class TakenBy(NamedTuple):
    """Names a command that takes an option as ``spmd-tx serve`` does."""

    name: str


class Accepts(NamedTuple):
    """Says which values an option accepts, where its type does not."""

    least: float = 1  # of a number
    most: float = MANY
    may_be_auto: bool = False  # instead of a number
    is_size: bool = False  # whether a text is a number of bytes, as 1GiB

    def check(self, option: str, value: object) -> None:
        """Raise StartError if the option cannot have this value."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            check_number(option, value, self.least, self.most)
        elif isinstance(value, str) and self.may_be_auto:
            raise StartError(f"{option} is {value!r}; it must be a number, or {AUTO}")
        elif isinstance(value, str) and self.is_size:
            try:
                parse_size(value, whole=0)
            except ValueError as error:
                raise StartError(f"{option} is wrong: {error}") from None


FROM_ZERO = Accepts(least=0)
Port = Annotated[int, Accepts(least=0, most=HIGHEST_PORT)]
ByteSize = Annotated[str, Accepts(is_size=True)]
NumberOrAuto = Annotated[int | Literal["auto"], Accepts(may_be_auto=True)]  # auto: by the devices
PLAN, GC, WORKER = TakenBy("plan"), TakenBy("gc"), TakenBy("worker")  # take an option beside serve


class Option(NamedTuple):
    """Describes an option."""

    type: Any
    help: str
    heading: str
    accepts: Accepts
    commands: tuple[str, ...]  # that take it


def declared(options: type) -> Iterator[tuple[str, Option]]:
    """Yield the names and descriptions of the fields that are options: those that have a help text.

    A class comes before those that it inherits from.
    """
    heading, hints = "", typing.get_type_hints(options, include_extras=True)
    for name in chain.from_iterable(map(inspect.get_annotations, options.__mro__)):
        hint = hints[name]
        marks = getattr(hint, "__metadata__", ())
        heading = next((mark.text for mark in marks if isinstance(mark, Heading)), heading)
        given = [mark for mark in marks if isinstance(mark, Accepts)] or [Accepts()]
        accepts = given[-1]._replace(may_be_auto=any(mark.may_be_auto for mark in given))
        commands = ("serve", *(mark.name for mark in marks if isinstance(mark, TakenBy)))
        for text in marks:
            if isinstance(text, str):
                yield name, Option(hint.__origin__, text, heading, accepts, commands)


def flag(name: str) -> str:
    """Return how the command line names an option."""
    return f"--{name.replace('_', '-')}"


def check_number(option: str, value: float, least: float, most: float = MANY) -> None:
    """Raise StartError unless an option's value is a number in this range."""
    if value < least:
        raise StartError(f"{option} is {value}; it must be at least {least}")
    if not value <= most:  # true of what is no number, too
        raise StartError(f"{option} is {value}; it must be from {least} to {most}")
