"""Limits open client connections, and drops idle ones for new ones. Knows neither HTTP nor sockets.

Connections whose request is being answered stay. Of the others, those that never sent a whole request are
dropped first, then those kept alive for a next request; of each kind, the one that has waited longest.
"""

from dataclasses import dataclass, field
from typing import Protocol

from spmd_tx.bounds import Bounds

RESERVED_FILES = 128  # file descriptors for the log, the database, workers and just accepted connections


class Connection(Protocol):
    """Is a client's connection, as far as it matters here."""

    def drop(self) -> None:
        """Hang up."""
        ...


@dataclass
class _Address:
    """Holds the connections of an address. In both dicts, the one that has waited longest comes first."""

    count: int = 0
    new: dict[Connection, None] = field(default_factory=dict)  # without any whole request yet
    idle: dict[Connection, None] = field(default_factory=dict)  # between two requests


class Connections:
    """Holds all connections of one server. Every change takes constant time."""

    def __init__(self, most: int, most_per_address: int) -> None:
        self._most = most
        self._most_per_address = most_per_address
        self._addresses: dict[str, _Address] = {}
        self._address_of: dict[Connection, str] = {}
        self._all = _Address()

    @property
    def count(self) -> int:
        return self._all.count

    def admit(self, connection: Connection, address: str) -> bool:
        """Add a connection, perhaps dropping another one; return False if it must be closed."""
        peer = self._addresses.get(address)
        if peer is not None and peer.count >= self._most_per_address and not self._make_room(peer):
            return False
        if self._all.count >= self._most and not self._make_room(self._all):
            return False
        self._address_of[connection] = address
        for group in (self._addresses.setdefault(address, _Address()), self._all):
            group.count += 1
            group.new[connection] = None
        return True

    def begin(self, connection: Connection) -> None:
        """Note that a request has arrived and is being answered."""
        for group in self._groups(connection):
            group.new.pop(connection, None)
            group.idle.pop(connection, None)

    def end(self, connection: Connection) -> None:
        """Note that the request has been answered."""
        for group in self._groups(connection):
            group.idle[connection] = None

    def leave(self, connection: Connection) -> None:
        """Remove a closed connection. A second call does nothing."""
        groups = self._groups(connection)
        self.begin(connection)
        for group in groups:
            group.count -= 1
        address = self._address_of.pop(connection, None)
        if address is not None and not self._addresses[address].count:
            del self._addresses[address]

    def _groups(self, connection: Connection) -> tuple[_Address, ...]:
        address = self._address_of.get(connection)
        return () if address is None else (self._addresses[address], self._all)

    def _make_room(self, group: _Address) -> bool:
        for waiting in (group.new, group.idle):
            for connection in waiting:
                self.leave(connection)
                connection.drop()
                return True
        return False


def open_connections(bounds: Bounds, open_files: int) -> Connections:
    """Make the limits; ``open_files`` is this process's limit of file descriptors."""
    most = max(1, min(bounds.connections, open_files - RESERVED_FILES))
    return Connections(most, min(bounds.connections_per_address, max(1, most * 3 // 4)))
