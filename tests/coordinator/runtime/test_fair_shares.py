from collections import Counter

import pytest

from spmd_tx.coordinator.runtime.fair_shares import FairShares


def serve(shares: FairShares, costs: dict[str, int], tokens: int) -> Counter:
    """Serve all names in ``costs``, which always wait, in turns of that cost. Returns the tokens of each."""
    used = Counter()
    while used.total() < tokens:
        first = shares.ranking(costs)[0]
        shares.charge({first: costs[first]})
        used[first] += costs[first]
    return used


@pytest.mark.parametrize(
    "costs", [{"a": 100, "b": 100}, {"a": 1000, "b": 10}, {"a": 64, "b": 8192, "c": 500}]
)
def test_tokens_are_shared_equally_whatever_a_turn_costs(costs):
    used = serve(FairShares(), costs, tokens=100_000)
    for name in costs:
        assert used[name] == pytest.approx(used.total() / len(costs), abs=max(costs.values()))


def test_weights_divide_unequally():
    used = serve(FairShares({"a": 3.0}), {"a": 10, "b": 10}, tokens=4000)
    assert used == {"a": 3000, "b": 1000}


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
    serve(shares, {"a": 100}, tokens=10_000)
    used = serve(shares, {"a": 100, "b": 100}, tokens=1000)
    assert used == {"a": 500, "b": 500}


def test_who_shared_a_turn_pays_for_its_part():
    shares = FairShares()
    shares.ranking(["a", "b", "c"])
    shares.charge({"a": 100, "b": 20})
    assert shares.ranking(["a", "b", "c"]) == ["c", "b", "a"]
