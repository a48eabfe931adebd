"""Deals the devices of hosts to the workers of several groups. Pure."""

from collections.abc import Iterable

WorkerPlace = tuple[str, int]  # a group, and the number of a process in it


class DeviceShares:
    """Knows who takes which devices of each host. A worker that starts again takes the same ones."""

    def __init__(self) -> None:
        self._taken: dict[str, dict[WorkerPlace, range]] = {}  # by host
        self._expected: dict[str, set[str]] = {}  # groups by host

    def expect(self, host: str, group: str) -> None:
        """Note that a group has workers on a host."""
        self._expected.setdefault(host, set()).add(group)

    def is_shared(self, host: str) -> bool:
        """Whether several groups have workers on a host."""
        return len(self._expected.get(host, ())) > 1

    def take(self, host: str, place: WorkerPlace, count: int) -> list[int]:
        """Return the numbers of the devices of a worker: those that it has had, or the first free ones."""
        taken = self._taken.setdefault(host, {})
        before = taken.pop(place, None)
        if before is None or len(before) != count:
            first = _first_gap(taken.values(), count)
            before = range(first, first + count)
        taken[place] = before
        return list(before)


def _first_gap(taken: Iterable[range], count: int) -> int:
    """Return the first number from which so many are free."""
    first = 0
    for each in sorted(taken, key=lambda devices: devices.start):
        if each.start - first >= count:
            break
        first = max(first, each.stop)
    return first
