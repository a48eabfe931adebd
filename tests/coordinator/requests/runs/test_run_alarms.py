import pytest

from spmd_tx.coordinator.requests.runs.run_alarms import NORM, alarms


def test_a_run_in_good_health_has_no_alarm():
    rows = [{"kl:mean": 0.01, "entropy:mean": 0.5, NORM: 1.0 + n / 10, "loss:sum": 3.0} for n in range(8)]
    assert alarms(rows) == []
    assert alarms([]) == []


def test_what_is_not_finite_now_is_named():
    assert alarms([{"loss:sum": None}, {"loss:sum": 2.0, "kl:mean": None}]) == ["not finite: kl:mean"]
    (said,) = alarms([dict.fromkeys(("d", "c", "b", "a"))])
    assert said == "not finite: a, b, c and others"


@pytest.mark.parametrize("value, is_said", [(0.1, False), (0.11, True)])
def test_a_large_divergence(value, is_said):
    assert any("kl:mean 0.11" in said for said in alarms([{"kl:mean": value}])) == is_said


@pytest.mark.parametrize("value, is_said", [(0.01, False), (0.009, True)])
def test_little_entropy(value, is_said):
    assert any("entropy:mean 0.009" in said for said in alarms([{"entropy:mean": value}])) == is_said


def test_a_gradient_far_above_the_usual_one_but_not_among_the_first():
    usual = [{NORM: 1.0}, {"loss:sum": 1.0}, {NORM: 2.0}, {NORM: 2.0}, {NORM: 3.0}]
    assert alarms([*usual, {NORM: 20.0}]) == []
    assert alarms([*usual, {NORM: 21.0}]) == ["the gradient's norm, 21, is 10 times as large as usual"]
    assert alarms([*usual[1:], {NORM: 21.0}]) == []
    assert alarms([*usual, {NORM: 21.0}, {NORM: 2.0}]) == []  # it is over
