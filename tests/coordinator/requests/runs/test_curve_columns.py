import math

import pytest

from spmd_tx.coordinator.requests.runs import curve_columns
from spmd_tx.coordinator.requests.runs.curve_columns import CurveWindow, RunColumns, chosen
from spmd_tx.coordinator.wire.console.runs import LoggedPoint, MetricsPoint

STEPS = CurveWindow("step", -math.inf, math.inf)
TIMES = STEPS._replace(axis="time")


def columns_of(*metrics, at=lambda step: 100.0 + step):
    columns = RunColumns()
    columns.add([MetricsPoint(7 * step, step, at(step), each) for step, each in enumerate(metrics)])
    return columns


def drawn(columns, name, window=STEPS):
    curve = columns.curve(name, window)
    return None if curve is None else (curve.x, curve.y)


def test_a_short_curve_has_all_points_and_gaps():
    columns = columns_of({"a": 1.0}, {"b": 2.0}, {"a": None}, {"a": 0.123456789})
    assert drawn(columns, "a") == ([0.0, 2.0, 3.0], [1.0, None, 0.1234568])
    assert columns.curve("a", STEPS).low is None
    assert drawn(columns, "b", TIMES) == ([1.0], [2.0])
    assert drawn(columns, "c") is None
    assert columns.after == 21


def test_the_loss_per_token_and_both_speeds_are_derived():
    metrics = {"loss:sum": 300.0, "num_tokens:sum": 200.0, "sampled_tokens:sum": 50.0}
    columns = columns_of({}, metrics, metrics, at=lambda step: 100.0 + 4 * min(step, 1))
    assert drawn(columns, "loss per token") == ([1.0, 2.0], [1.5, 1.5])
    assert drawn(columns, "tokens per second") == ([1.0], [50.0])  # in the last step no time has passed
    assert drawn(columns, "sampled tokens per second") == ([1.0], [12.5])
    assert drawn(columns_of({"loss:sum": 1.0, "num_tokens:sum": 0.0}), "loss per token") is None
    assert drawn(columns_of({"loss:sum": None, "num_tokens:sum": 8.0}), "loss per token") is None


def test_groups_may_train_in_several_steps():
    names = "groups_sampled:sum", "groups_trained:sum"
    values = (8, 2), (None, 4), (None, None), (4, 0), (4, 4), (2, 3)
    columns = columns_of(
        *({name: float(n) for name, n in zip(names, each, strict=True) if n is not None} for each in values)
    )
    assert drawn(columns, "groups without variance") == ([0.0, 3.0, 4.0, 5.0], [0.25, 1.0, 0.0, 0.0])


def test_groups_of_which_nobody_knows_what_became_of_them_have_no_share():
    groups, trained = "groups_sampled:sum", "groups_trained:sum"
    columns = columns_of({groups: 4.0}, {groups: 4.0, trained: 3.0}, {groups: 4.0}, {trained: 1.0})
    assert drawn(columns, "groups without variance") == ([1.0], [0.25])


def test_a_step_behind_a_gap_has_no_speed():
    metrics = {"num_tokens:sum": 200.0, "sampled_tokens:sum": 50.0}
    columns = RunColumns()
    columns.add(MetricsPoint(step, step, 10.0 * step, metrics) for step in (0, 4, 8, 9))
    assert drawn(columns, "tokens per second") == ([9.0], [20.0])
    assert drawn(columns, "sampled tokens per second") == ([9.0], [5.0])


def test_what_a_client_sends_later_counts_and_need_not_be_in_order():
    columns = columns_of({"reward": 9.0})
    columns.add_logged(
        LoggedPoint(number, step, 90.0 + number, {"reward": value})
        for number, (step, value) in enumerate([(5, 1.0), (3, 2.0), (5, 4.0)])
    )
    assert drawn(columns, "reward") == ([0.0, 3.0, 5.0], [9.0, 2.0, 4.0])
    assert drawn(columns, "reward", TIMES) == (
        [1.0, 2.0, 10.0],
        [2.0, 4.0, 9.0],
    )  # began with the first message
    assert columns.logged_after == 2


def test_a_long_curve_has_few_points_and_no_peak_is_lost():
    steps = 20_000
    columns = columns_of(*({"a": float(step % 10)} for step in range(steps)))
    columns.add([MetricsPoint(10**6, steps, 10**6, {"a": 1e6})])
    curve = columns.curve("a", STEPS)
    assert 400 < len(curve.x) <= 500
    assert max(curve.high) == 1e6
    assert min(curve.low) == 0.0
    assert curve.x == sorted(curve.x)
    assert curve.y[10] == pytest.approx(4.5, abs=0.3)
    assert len(columns._of_server["a"]) <= curve_columns.MOST_KEPT


def test_a_part_of_the_axis_has_more_of_its_points_and_one_on_both_sides():
    columns = columns_of(*({"a": float(step)} for step in range(3000)))
    assert len(columns.curve("a", STEPS).x) <= 500
    part = columns.curve("a", CurveWindow("step", 100.0, 109.0))
    assert (part.x, part.low) == ([*map(float, range(99, 111))], None)
    assert columns.curve("a", CurveWindow("step", 5000.0, 6000.0)) is None
    assert columns.curve("a", CurveWindow("step", 5.2, 5.4)) is None


def test_what_is_not_finite_is_left_out_of_a_stretch():
    columns = columns_of(*({"a": None if step % 2 else 1.0} for step in range(2000)))
    curve = columns.curve("a", STEPS)
    assert (set(curve.y), curve.low) == ({1.0}, None)
    columns = columns_of(*({"a": None} for _ in range(2000)))
    assert set(columns.curve("a", STEPS).y) == {None}


def test_what_a_client_repeats_of_the_server_is_left_out():
    columns = columns_of({"kl:mean": 1.0, "reward": 1.0}, {"kl:mean": 2.0})
    repeated = {"kl:mean": 1.0, "ratio:max": 3.0, "reward": 4.0}
    columns.add_logged([LoggedPoint(0, 5, 105.0, repeated)])
    assert drawn(columns, "kl:mean") == ([0.0, 1.0], [1.0, 2.0])
    assert drawn(columns, "ratio:max") == ([5.0], [3.0])
    assert drawn(columns, "reward") == ([0.0, 5.0], [1.0, 4.0])


def test_metrics_that_most_readers_want_come_first():
    ordered = ["env/all/reward/total", "abs_advantage:mean", "kl:mean", "grad_norm", "learning_rate:mean"]
    ordered += ["alpha", "unclipped_grad_l2_attn:mean", "zeta"]
    columns = columns_of(dict.fromkeys(ordered[::-1], 1.0))
    assert columns.names == ordered
    assert chosen(columns, [], 3) == ordered[:3]
    assert chosen(columns, ["zeta", "nothing", "alpha"], 1) == ["zeta", "alpha"]
