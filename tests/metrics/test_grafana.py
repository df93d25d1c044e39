"""The dashboard for Grafana is of metrics that there are, and is the one that the code makes."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest

from elastic3d.metrics.metric import COMMON, MetricKind
from elastic3d.metrics.table import METRICS
from tests.metrics import promtool
from tools import grafana

SUFFIXES = {
    MetricKind.HISTOGRAM: ("_bucket", "_sum", "_count"),
    MetricKind.SUMMARY: ("_sum", "_count"),
}
PANELS = [panel for section in grafana.SECTIONS for panel in section.panels]


def test_the_file_is_current() -> None:
    """`make reference` has been run since the table or the panels changed."""
    assert grafana.PATH.read_text() == grafana.text()


@pytest.mark.parametrize("panel", PANELS, ids=[panel.title for panel in PANELS])
def test_an_expression_asks_for_series_and_labels_that_there_are(panel: grafana.Panel) -> None:
    """Of metrics in the table, by their own labels and those of all; of the run that was chosen."""
    assert panel.metric in METRICS
    series = {
        f"{name}{suffix}": {*COMMON, *(label.name for label in metric.labels), *(["le"] if suffix == "_bucket" else [])}
        for name, metric in METRICS.items()
        for suffix in SUFFIXES.get(metric.kind, ("",))
    }
    for expression, legend in panel.queries:
        asked = re.findall(r"(elastic3d_\w+)\{([^}]*)\}", expression)
        assert len(asked) == expression.count("elastic3d_")
        labels = set.intersection(*(series[name] for name, _ in asked))
        for name, choice in asked:
            assert choice.startswith('run="$run"')
            assert set(re.findall(r"(\w+)=", choice)) <= series[name]
        for group in re.findall(r"by \(([^)]*)\)", expression):
            assert set(group.split(", ")) <= labels
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= labels


def test_expressions_are_those_of_prometheus(tmp_path: Path) -> None:
    """By its own parser, as rules that record them."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not on PATH")
    rules = [
        {"record": f"panel_{number}", "expr": expression.replace("$__rate_interval", "5m").replace("$__interval", "5m")}
        for number, (expression, _) in enumerate(query for panel in PANELS for query in panel.queries)
    ]
    (tmp_path / "panels.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    promtool.check("check", "rules", "panels.yml", folder=tmp_path)


def test_panels_lie_beside_each_other() -> None:
    """Within 24 columns, each with a number of its own, and none over another."""
    panels = grafana.dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    for one, other in itertools.combinations([panel["gridPos"] for panel in panels], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
