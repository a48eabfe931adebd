from dataclasses import replace

import pytest

from tools.bench import figures, tables
from tools.bench.figures import FIGURES, SECTIONS, Figure, Row
from tools.bench.sections import LOADS, Sections


def row(ours: float | None, peer: float | None, is_lower_better: bool = False) -> Row:
    bounds = (0.5, 0.25) if is_lower_better else (2.0, 4.0)
    figure = Figure("speed", "tokens/s", "train", figures.median_rate, is_lower_better, *bounds)
    return Row(figure, ours, peer)


@pytest.mark.parametrize(
    "share, expected", [(0.0, 1.0), (0.5, 2.5), (0.95, 3.85), (1.0, 4.0)], ids="p{0:g}".format
)
def test_percentiles_lie_between_the_nearest_values(share, expected):
    assert figures.percentile([4.0, 1.0, 3.0, 2.0], share) == pytest.approx(expected)


@pytest.mark.parametrize(
    "ours, peer, is_lower_better, expected",
    [
        (199.0, 100.0, False, "missed"),
        (200.0, 100.0, False, "must met"),
        (400.0, 100.0, False, "aim met"),
        (51.0, 100.0, True, "missed"),
        (50.0, 100.0, True, "must met"),
        (25.0, 100.0, True, "aim met"),
        (None, 100.0, True, "no figure"),
        (50.0, None, True, "no figure"),
    ],
)
def test_a_ratio_is_held_against_its_bounds(ours, peer, is_lower_better, expected):
    assert row(ours, peer, is_lower_better).verdict() == expected


@pytest.mark.parametrize(
    "first, warm, peer, is_lower_better, expected",
    [
        (85.0, 100.0, 10.0, False, "met"),
        (84.0, 100.0, 10.0, False, "below 0.85 of warm"),
        (1.17, 1.0, 10.0, True, "met"),
        (1.18, 1.0, 10.0, True, "below 0.85 of warm"),
        (95.0, 100.0, 95.0, False, "behind the peer"),
        (1.5, 1.0, 1.4, True, "below 0.85 of warm, behind the peer"),
        (90.0, 100.0, None, False, "met"),
        (None, 100.0, 10.0, False, ""),
    ],
)
def test_the_first_minute_is_held_against_the_later_ones_and_the_peer(
    first, warm, peer, is_lower_better, expected
):
    assert replace(row(warm, peer, is_lower_better), first=first).first_verdict() == expected


def test_where_compiling_counts_the_first_minute_need_only_be_ahead_of_the_peer():
    fresh = next(figure for figure in FIGURES if figure.section == "train_fresh")
    assert Row(fresh, ours=100.0, peer=10.0, first=50.0).first_verdict() == "met"
    assert Row(fresh, ours=100.0, peer=60.0, first=50.0).first_verdict() == "behind the peer"


def test_the_first_minute_is_read_from_turns_of_its_own():
    warm, first = ({"seconds": [each], "tokens": [100], "cpu_s": 1.0} for each in (1.0, 2.0))
    turn = {"train_uniform": warm, "first minute: train_uniform": first, "train_ragged": warm}
    uniform, ragged = figures.rows([turn | {"first minute: train_ragged": {"error": "too slow"}}], [])
    assert (uniform.ours, uniform.first, uniform.first_speed) == (100.0, 50.0, 0.5)
    assert (ragged.first, ragged.first_verdict(), ragged.error) == (
        None,
        "no figure",
        "ours in the first minute: too slow",
    )


def test_a_slow_repetition_has_its_full_weight_among_new_lengths_and_little_in_a_median():
    turns = [{"seconds": [1.0, 1.0], "tokens": [100, 100]}, {"seconds": [8.0], "tokens": [100]}]
    assert figures.median_rate(turns) == 100.0
    assert figures.overall_rate(turns) == 30.0


def test_rows_take_all_rounds_and_name_what_failed():
    uniform = {"seconds": [1.0, 2.0, 4.0], "tokens": [100, 100, 100], "cpu_s": 5.0}
    ours = [{"train_uniform": uniform}, {"train_uniform": uniform, "train_ragged": {"error": "too slow"}}]
    peer = [{"train_uniform": {**uniform, "tokens": [10, 10, 10]}, "train_ragged": uniform}]
    first, second = figures.rows(ours, peer)
    assert (first.ours, first.peer, first.ratio, first.cpu_ratio) == (50.0, 5.0, 10.0, 10.0)
    assert (second.ours, second.peer, second.verdict()) == (None, 50.0, "no figure")
    assert second.error == "ours: too slow"


def test_every_section_exists_and_every_figure_is_of_one():
    assert all(callable(getattr(Sections, name)) for name in SECTIONS)
    of_starts = {"cold_start", "warm_start", "settled", "memory"}
    assert {figure.section for figure in FIGURES} <= {*SECTIONS, *of_starts}


def test_a_group_of_the_benchmark_has_as_many_good_answers_as_bad_ones():
    assert all(load.group % 2 == 0 for load in LOADS.values())


def test_tables_line_up_and_show_three_digits():
    lines = [tables.cells(each) for each in (row(12345.6, 1000.0), row(0.01234, None))]
    header, first, second = tables.text(tables.HEADER, lines).splitlines()
    assert first.split() == [
        "speed",
        "(tokens/s)",
        "12,346",
        "1,000",
        "12.3",
        "≥",
        "2",
        "≥",
        "4",
        "aim",
        "met",
    ]
    assert second.split() == ["speed", "(tokens/s)", "0.0123", "-", "-", "≥", "2", "≥", "4", "no", "figure"]
    assert first.index("12,346") + len("12,346") == header.index("warm ") + len("warm")
    assert tables.markdown(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_what_is_published_replaces_what_was_between_the_marks_and_nothing_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- make bench -->\nold\n<!-- end of make bench -->\nafter\n")
    tables.publish(page, "make bench", "new \\1 | figures\n")
    assert page.read_text() == (
        "before\n<!-- make bench -->\nnew \\1 | figures\n<!-- end of make bench -->\nafter\n"
    )
    with pytest.raises(ValueError, match=r"page\.md has no part between <!-- other -->"):
        tables.publish(page, "other", "new")
