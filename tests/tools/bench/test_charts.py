from xml.etree import ElementTree

import pytest

from tools.bench import charts, tenants
from tools.bench.charts import Panel

SVG = "{http://www.w3.org/2000/svg}"


def test_equal_factors_are_equal_steps_to_the_right_and_the_largest_value_fits():
    chart = charts.svg([Panel("memory & more", {"ours": [10.0, 20.0, 50.0]})], "tenants", [1, 8, 64])
    root = ElementTree.fromstring(chart)
    (line,) = root.iter(f"{SVG}polyline")
    places = [tuple(map(float, place.split(","))) for place in line.attrib["points"].split()]
    (x0, y0), (x1, y1), (x2, y2) = places
    assert x1 - x0 == pytest.approx(x2 - x1)
    bottom = charts.HEIGHT - charts.BOTTOM
    assert (y2, y1, y0) == pytest.approx((charts.TOP, bottom - 48, bottom - 24))
    assert "memory & more" in {text.text for text in root.iter(f"{SVG}text")}


def test_bars_are_as_long_as_their_values():
    root = ElementTree.fromstring(charts.bars("speed", {"ours": 4.0, "theirs": 1.0}, unit="x", mark=1))
    ours, theirs = (float(bar.attrib["width"]) for bar in list(root.iter(f"{SVG}rect"))[1:])
    (mark,) = root.iter(f"{SVG}line")
    assert ours == pytest.approx(4 * theirs, abs=0.2)
    assert float(mark.attrib["x1"]) == pytest.approx(charts.NAMES + theirs, abs=0.1)
    assert {"ours", "4x", "theirs", "1x"} <= {text.text for text in root.iter(f"{SVG}text")}


@pytest.mark.parametrize(
    "value, expected", [(0, 1), (0.7, 1), (1, 1), (1.01, 2), (240, 250), (2600, 5000), (0.03, 0.05)]
)
def test_axes_end_at_a_round_number(value, expected):
    assert charts.nice_ceiling(value) == pytest.approx(expected)


def test_tenants_are_held_against_their_bounds():
    report = {
        "counts": [1, 8],
        "latency_ms": [5.0, 5.5],
        "memory_mib": [900.0, 1100.0],
        "training": [1000.0, 850.0],
        "sampling": [2000.0, 1900.0],
        "short_s": 0.25,
        "long_s": 5.0,
        "load": 1.0,
    }
    assert tenants.verdicts(report) == [
        "training, 8 tenants / 1 tenant: 0.85 (must: at least 0.95)",
        "sampling, 8 tenants / 1 tenant: 0.95 (must: at least 0.9)",
        "a sample of 4 tokens beside one of 1500: 0.25 s and 5.00 s, 0.050 of it (must: at most 0.1)",
    ]
    assert "| 8 | 5.5 | 1,100 | 850 | 1,900 |" in tenants.markdown(report)
    assert len(list(ElementTree.fromstring(tenants.chart(report)).iter(f"{SVG}polyline"))) == 4
