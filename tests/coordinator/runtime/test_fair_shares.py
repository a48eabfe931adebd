from collections import Counter

import pytest

from spmd_tx.coordinator.runtime.fair_shares import FairShares


def serve(shares: FairShares, costs: dict[str, float], seconds: float) -> Counter:
    """Serve all names in ``costs``, which always wait, in turns of that cost. Returns the seconds of each."""
    used = Counter()
    while used.total() < seconds:
        first = shares.ranking(costs)[0]
        shares.charge({first: costs[first]})
        used[first] += costs[first]
    return used


@pytest.mark.parametrize("costs", [{"a": 1, "b": 1}, {"a": 10, "b": 0.1}, {"a": 0.0625, "b": 8, "c": 0.5}])
def test_seconds_are_shared_equally_whatever_a_turn_costs(costs):
    used = serve(FairShares(), costs, seconds=1000)
    for name in costs:
        assert used[name] == pytest.approx(used.total() / len(costs), abs=max(costs.values()))


def test_weights_divide_unequally():
    used = serve(FairShares({"a": 3.0}), {"a": 1, "b": 1}, seconds=400)
    assert used == {"a": 300, "b": 100}


def test_equals_take_turns():
    shares = FairShares()
    order = []
    for _ in range(6):
        first = shares.ranking(["a", "b", "c"])[0]
        shares.charge({first: 5})
        order.append(first)
    assert order == ["a", "b", "c", "a", "b", "c"]


def test_nobody_saves_up_a_share_while_not_waiting():
    shares = FairShares()
    serve(shares, {"a": 1}, seconds=100)
    used = serve(shares, {"a": 1, "b": 1}, seconds=10)
    assert used == {"a": 5, "b": 5}


def test_who_shared_a_turn_pays_for_its_part():
    shares = FairShares()
    shares.ranking(["a", "b", "c"])
    shares.charge({"a": 5, "b": 1})
    assert shares.ranking(["a", "b", "c"]) == ["c", "b", "a"]


def test_what_was_used_in_advance_is_remembered_while_not_waiting():
    shares = FairShares()
    shares.ranking(["a", "b"])
    shares.charge({"a": 10})
    serve(shares, {"b": 1}, seconds=2)
    assert serve(shares, {"a": 1, "b": 1}, seconds=8) == {"b": 8}


def test_who_is_passed_over_is_owed_the_time_but_those_who_come_later_are_not():
    shares = FairShares()
    for _ in range(20):
        assert shares.ranking(["blocked", "a"])[0] == "blocked" or shares._turns == 0
        shares.charge({"a": 1})
    used = serve(shares, {"blocked": 1, "a": 1, "late": 1}, seconds=21)
    assert used["blocked"] >= 19
    assert serve(shares, {"blocked": 1, "a": 1, "late": 1}, seconds=30) == {
        "blocked": 10,
        "a": 10,
        "late": 10,
    }


@pytest.mark.parametrize("charged", [0, 1, 8])
def test_a_wrong_charge_that_is_corrected_changes_nothing(charged):
    shares, used = FairShares(), Counter()
    for _ in range(100):
        first = shares.ranking(["a", "b"])[0]
        cost = {"a": 4, "b": 1}[first]
        shares.charge({first: charged})
        shares.correct({first: cost - charged})
        used[first] += cost
    assert used["a"] == pytest.approx(used["b"], abs=8)


def test_nobody_is_owed_or_owes_more_than_a_minute():
    shares = FairShares()
    shares.ranking(["a", "b"])
    shares.charge({"a": 10_000})
    assert serve(shares, {"a": 1, "b": 1}, seconds=70)["a"] == pytest.approx(5, abs=1)


def test_many_names_that_come_once_are_not_kept():
    shares = FairShares()
    for number in range(10_000):
        shares.ranking([str(number)])
        shares.charge({str(number): 1})
    assert len(shares._accounts) < 2000
