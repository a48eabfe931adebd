"""Which methods and commands are checked, and how: the table behind docs/tinker_api.md."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from tests.conformance.world import World

Check = Callable[[World], None]

TWINS = "[_async]"  # behind the name of a method that has an asynchronous twin


class Standing(Enum):
    """What the service has to do with a method, and the words for it on the page."""

    SERVED = "served"
    LOCAL = "local"  # the SDK does it alone
    CANNOT_APPLY = "cannot apply"  # to a server of one's own


@dataclass(frozen=True)
class Entry:
    """One method with its twin, or one command, and the check that calls it."""

    names: tuple[str, ...]  # "TrainingClient.forward", "TrainingClient.forward_async"; "tinker run list"
    label: str  # as the page shows it
    standing: Standing
    does: str  # what the server, or the SDK alone, does
    effect: str  # what the check sees
    check: Check

    @property
    def group(self) -> str:
        return "tinker" if self.label.startswith("tinker ") else self.label.split(".")[0]


entries: list[Entry] = []


def covers(*labels: str, does: str, effect: str, standing: Standing = Standing.SERVED) -> Callable:
    """Enter a check under each of these names. One check may call several methods that need each other."""

    def enter(check: Check) -> Check:
        for label in labels:
            entries.append(Entry(_names(label), label, standing, does, effect, check))
        return check

    return enter


def _names(label: str) -> tuple[str, ...]:
    if " (" in label:
        return ()  # more about a method that has an entry of its own
    name = label.removesuffix(TWINS)
    return (name, f"{name}_async") if label.endswith(TWINS) else (name,)
