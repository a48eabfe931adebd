import base64

import pytest

from spmd_tx.coordinator.http.security.turn_seals import TurnSeals

SEALS = TurnSeals(b"secret" * 6)


def test_a_seal_names_the_turn_to_its_owner_alone():
    seal = SEALS.seal("alice", "request:0")
    assert SEALS.open("alice", seal) == "request:0"
    assert SEALS.open("mallory", seal) is None
    assert TurnSeals(b"other" * 6).open("alice", seal) is None


@pytest.mark.parametrize("forged", ["", "ü", "c3R1Yg==", "=" * 9, "A" * 100_000, "\ud800", "-_-"])
def test_what_is_no_seal_names_nothing(forged):
    assert SEALS.open("alice", forged) is None


def test_a_seal_with_another_turn_in_it_names_nothing():
    raw = base64.urlsafe_b64decode(SEALS.seal("alice", "request:0") + "==")
    assert SEALS.open("alice", base64.urlsafe_b64encode(raw[:-1] + b"1").decode()) is None
