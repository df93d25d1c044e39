"""The rules for alerts name metrics, labels and values that there are, and pages that say what to do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from elastic3d.metrics.metric import COMMON, MetricKind
from elastic3d.metrics.table import METRICS
from tests.metrics import promtool
from tests.paths import ROOT

FOLDER = ROOT / "deploy" / "prometheus"
GUIDE = ROOT / "docs" / "guides" / "metrics.md"
NAME = re.compile(r"(elastic3d_[a-z_]+)(?:\{([^}]*)\})?")
SUFFIX = re.compile(r"_(bucket|sum|count)$")


def rules() -> list[dict[str, Any]]:
    """Return the rules."""
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return list(group["rules"])


def unknown(expression: str) -> list[str]:
    """Return what an expression names that the table of metrics does not have."""
    wrong = []
    for name, selector in NAME.findall(expression):
        metric = METRICS.get(name) or METRICS.get(SUFFIX.sub("", name))
        if metric is None:
            wrong.append(name)
            continue
        known = {label.name: label.values for label in metric.labels}
        for label, _, values in re.findall(r'(\w+)(=~?|!~|!=)"([^"]*)"', selector):
            if label not in known and label not in COMMON:
                wrong.append(f"{name}{{{label}}}")
            elif label in known:
                wrong += [f"{name}{{{label}={value}}}" for value in values.split("|") if value not in known[label]]
        if name in METRICS and metric.kind in (MetricKind.HISTOGRAM, MetricKind.SUMMARY):
            wrong.append(f"{name}: of a {metric.kind} there are _sum and _count")
    return wrong


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_a_rule_asks_for_metrics_that_there_are(rule: dict[str, Any]) -> None:
    """It says what to do, and its page says more."""
    assert unknown(rule["expr"]) == []
    assert "by (run" in rule["expr"]
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert ROOT / page == GUIDE
    assert anchor == rule["alert"].lower()
    assert f"\n### {rule['alert']}\n" in GUIDE.read_text()


def test_the_guide_has_no_rule_that_is_not_there_and_asks_for_metrics_that_are() -> None:
    """Its expressions are as good as the rules."""
    text = GUIDE.read_text()
    assert re.findall(r"^### (\S+)$", text, re.MULTILINE) == [rule["alert"] for rule in rules()]
    expressions = [code for code in re.findall(r"`([^`\n]+)`", text) if " by (run" in code]
    assert len(expressions) >= 10
    assert [wrong for expression in expressions for wrong in unknown(expression)] == []


def test_every_rule_is_tried_and_the_tests_of_the_rules_use_metrics_that_there_are() -> None:
    """A rule without a test may never fire."""
    tests = yaml.safe_load((FOLDER / "alerts.test.yml").read_text())
    tried = {one["alertname"] for test in tests["tests"] for one in test["alert_rule_test"] if one["exp_alerts"]}
    assert tried == {rule["alert"] for rule in rules()}
    series = [one["series"].replace("'", '"') for test in tests["tests"] for one in test["input_series"]]
    assert [wrong for one in series for wrong in unknown(one)] == []


def test_prometheus_itself_takes_the_rules_and_they_fire_when_they_should() -> None:
    """Where its checker is at hand; that every rule is tried at all is asserted in any case."""
    assert rules()
    promtool.check("check", "rules", "alerts.yml", folder=FOLDER)
    promtool.check("test", "rules", "alerts.test.yml", folder=FOLDER)
