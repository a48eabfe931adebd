import resource

import pytest

from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.http.security.connections import Connections, open_connections
from spmd_tx.coordinator.runtime import open_files


class Connection:
    is_dropped = False

    def drop(self):
        self.is_dropped = True


@pytest.fixture
def connections():
    return Connections(most=4, most_per_address=3)


def admit(connections, address="a", count=1):
    new = [Connection() for _ in range(count)]
    assert all(connections.admit(each, address) for each in new)
    return new


def test_who_has_never_asked_makes_room_first_and_of_those_the_oldest(connections):
    idle, first, second = admit(connections, count=3)
    connections.begin(idle)
    connections.end(idle)
    admit(connections)
    assert [each.is_dropped for each in (idle, first, second)] == [False, True, False]


def test_then_who_keeps_a_connection_for_a_next_request(connections):
    busy, old, young = admit(connections, count=3)
    for each in (busy, young, old):
        connections.begin(each)
    connections.end(old)
    connections.end(young)
    admit(connections)
    assert [each.is_dropped for each in (busy, old, young)] == [False, True, False]


def test_who_is_being_answered_stays_and_newcomers_are_refused(connections):
    busy = admit(connections, "a", 2) + admit(connections, "b", 2)
    for each in busy:
        connections.begin(each)
    assert not connections.admit(Connection(), "c")
    assert not any(each.is_dropped for each in busy)
    connections.leave(busy[0])
    admit(connections, "c")


def test_an_address_makes_room_for_itself_only(connections):
    (other,) = admit(connections, "b")
    mine = admit(connections, "a", 3)
    admit(connections, "a")
    assert not other.is_dropped
    assert mine[0].is_dropped
    for each in mine[1:]:
        connections.begin(each)


def test_all_are_forgotten_when_they_leave(connections):
    here = admit(connections, "a", 3)
    for each in here:
        connections.begin(each)
        connections.leave(each)
        connections.leave(each)
        connections.end(each)
    assert connections.count == 0
    assert not connections._addresses
    assert not connections._all.idle


@pytest.mark.parametrize(
    "files, most, per_address", [(256, 128, 96), (1 << 20, 16_384, 4096), (100, 1, 1)], ids=str
)
def test_files_are_left_for_the_log(files, most, per_address):
    connections = open_connections(Bounds(), files)
    assert (connections._most, connections._most_per_address) == (most, per_address)


@pytest.mark.parametrize(
    "limits, raised",
    [
        ((256, 4096), 4096),
        ((4096, 4096), 4096),
        ((1024, resource.RLIM_INFINITY), open_files.MAX_FILES),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), open_files.MAX_FILES),
    ],
)
def test_the_soft_limit_is_raised_to_the_hard_one(monkeypatch, limits, raised):
    changes = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: changes.append(new))
    assert open_files.raise_limit() == raised
    assert changes in ([], [(raised, limits[1])])
    assert bool(changes) == (limits[0] not in (raised, resource.RLIM_INFINITY))
