"""The dashboard and the alerts ask for metrics that there are, with labels that they have."""

import json
import re
from pathlib import Path

import pytest
import yaml

from spmd_tx.coordinator.runtime.metrics import REGISTRY

FOLDER = Path(__file__).parents[1] / "launch" / "grafana"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
OF_PROMETHEUS = {"instance", "job", "le"}


def known() -> dict[str, set[str]]:
    """The labels of each time series."""
    found = {}
    for collector in REGISTRY._collector_to_names:
        (family,) = collector.describe()
        for suffix in SUFFIXES[family.type]:
            found[family.name + suffix] = {*collector._labelnames, *OF_PROMETHEUS}
    return found


def dashboard() -> list[str]:
    panels = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def alerts() -> list[str]:
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("expression", [*dashboard(), *alerts()])
def test_an_expression_asks_for_what_there_is(expression):
    series = known()
    names = re.findall(r"spmd_tx_\w+", expression)
    assert names or "up{" in expression
    labels = set()
    for name in names:
        assert name in series, f"there is no {name}"
        labels |= series[name]
    by = [label for group in re.findall(r"(?:by|on) \(([^)]*)\)", expression) for label in group.split(", ")]
    matched = re.findall(r"(\w+)(?:=~|!=|=)\"", expression)
    assert {*by, *matched} <= (labels or OF_PROMETHEUS)
    assert expression.count("(") == expression.count(")")


def test_every_panel_has_a_place_of_its_own():
    panels = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)
