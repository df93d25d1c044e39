"""The dashboard for Grafana in deploy/grafana, made from the table of metrics; `make reference` writes it.

A panel names the metric that it is of, from which it has its description; a metric that the table does not have is an
error. The form is that of schema version 38 (Grafana 10), which later versions read and migrate.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic3d.metrics.table import METRICS

PATH = Path(__file__).parent.parent / "deploy" / "grafana" / "elastic3d.json"
SCHEMA = 38
WIDTH, HEIGHT, ACROSS = 8, 8, 3
"""Size of a panel on Grafana's grid of 24 columns, and panels in a row."""

_SOURCE = {"type": "prometheus", "uid": "${source}"}
_RUN = 'run="$run"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A chart over time. metric: the one that it is about. queries: expressions, with the text of their legends."""

    title: str
    metric: str
    unit: str
    queries: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A row of panels under a title."""

    title: str
    panels: Sequence[Panel]


def _rate(name: str, by: str = "run", more: str = "") -> str:
    return f"sum by ({by}) (rate({name}{{{_RUN}{more}}}[$__rate_interval]))"


def _increase(name: str, by: str, more: str = "") -> str:
    return f"sum by ({by}) (increase({name}{{{_RUN}{more}}}[$__interval])) > 0"


def _one(name: str, more: str = "", *, by: str = "run", of: str = "max") -> str:
    return f"{of} by ({by}) ({name}{{{_RUN}{more}}})"


def _share(name: str, quantile: float, more: str = "") -> str:
    return f"histogram_quantile({quantile}, sum by (le) (rate({name}_bucket{{{_RUN}{more}}}[1h])))"


_PEAK = f"elastic3d_node_peak_flops_per_second{{{_RUN}}}"
UTILISATION = (
    f"{_rate('elastic3d_model_flops_total')} / sum by (run) ({_PEAK}) "
    f"and on (run) count by (run) ({_PEAK}) == on (run) " + _one("elastic3d_nodes", ',state="active"')
)
"""Left out where the peak of a node that trains is not known."""

SECTIONS = (
    Section(
        title="Training",
        panels=(
            Panel(
                title="Loss",
                metric="elastic3d_loss",
                unit="none",
                queries=((_one("elastic3d_loss"), "loss"),),
            ),
            Panel(
                title="Step",
                metric="elastic3d_step",
                unit="none",
                queries=(
                    (_one("elastic3d_step"), "made"),
                    (_one("elastic3d_safe_step", of="min"), "held twice"),
                    (_one("elastic3d_checkpoint_step", ',ref="latest"'), "in the store"),
                ),
            ),
            Panel(
                title="Steps and samples a second",
                metric="elastic3d_samples_total",
                unit="none",
                queries=(
                    (_rate("elastic3d_steps_total"), "steps"),
                    (_rate("elastic3d_samples_total"), "samples"),
                ),
            ),
            Panel(
                title="Tokens a second",
                metric="elastic3d_tokens_total",
                unit="none",
                queries=((_rate("elastic3d_tokens_total"), "tokens"),),
            ),
            Panel(
                title="Model FLOPs utilisation",
                metric="elastic3d_model_flops_total",
                unit="percentunit",
                queries=((UTILISATION, "of the peak of all devices"),),
            ),
            Panel(
                title="Sent from node to node",
                metric="elastic3d_gradient_sent_bytes_total",
                unit="Bps",
                queries=(
                    (_rate("elastic3d_gradient_sent_bytes_total"), "gradients"),
                    (_rate("elastic3d_snapshot_sent_bytes_total"), "snapshots"),
                ),
            ),
            Panel(
                title="What a step goes into",
                metric="elastic3d_step_phase_seconds",
                unit="s",
                queries=((_one("elastic3d_step_phase_seconds", by="phase", of="avg"), "{{phase}}"),),
            ),
            Panel(
                title="A step, median and 99 of 100",
                metric="elastic3d_step_duration_seconds",
                unit="s",
                queries=(
                    (_share("elastic3d_step_duration_seconds", 0.5), "median"),
                    (_share("elastic3d_step_duration_seconds", 0.99), "99 of 100"),
                ),
            ),
            Panel(
                title="Gradient norm",
                metric="elastic3d_gradient_norm",
                unit="none",
                queries=((_one("elastic3d_gradient_norm"), "norm"),),
            ),
        ),
    ),
    Section(
        title="Nodes",
        panels=(
            Panel(
                title="Nodes",
                metric="elastic3d_nodes",
                unit="none",
                queries=(
                    (_one("elastic3d_nodes", by="state"), "{{state}}"),
                    (_one("elastic3d_nodes_awaited"), "waited for"),
                ),
            ),
            Panel(
                title="Generations by cause",
                metric="elastic3d_generations_total",
                unit="none",
                queries=((_increase("elastic3d_generations_total", "cause"), "{{cause}}"),),
            ),
            Panel(
                title="Steps made again",
                metric="elastic3d_steps_repeated_total",
                unit="none",
                queries=((_increase("elastic3d_steps_repeated_total", "run"), "steps"),),
            ),
            Panel(
                title="A recovery, median and nine of ten",
                metric="elastic3d_recovery_duration_seconds",
                unit="s",
                queries=(
                    (_share("elastic3d_recovery_duration_seconds", 0.5, ',kind="loss"'), "median"),
                    (_share("elastic3d_recovery_duration_seconds", 0.9, ',kind="loss"'), "nine of ten"),
                ),
            ),
            Panel(
                title="Recoveries by phase",
                metric="elastic3d_recovery_phase_seconds_total",
                unit="s",
                queries=((_increase("elastic3d_recovery_phase_seconds_total", "phase", ',kind="loss"'), "{{phase}}"),),
            ),
            Panel(
                title="Trainers that ended",
                metric="elastic3d_trainer_exits_total",
                unit="none",
                queries=((_increase("elastic3d_trainer_exits_total", "kind"), "{{kind}}"),),
            ),
        ),
    ),
    Section(
        title="State and store",
        panels=(
            Panel(
                title="Age of what a death would go back to",
                metric="elastic3d_snapshot_age_seconds",
                unit="s",
                queries=((_one("elastic3d_snapshot_age_seconds", of="min"), "in memory"),),
            ),
            Panel(
                title="Age of checkpoints",
                metric="elastic3d_checkpoint_age_seconds",
                unit="s",
                queries=((_one("elastic3d_checkpoint_age_seconds", by="ref", of="min"), "{{ref}}"),),
            ),
            Panel(
                title="Written to the store",
                metric="elastic3d_checkpoint_written_bytes_total",
                unit="Bps",
                queries=(
                    (_rate("elastic3d_checkpoint_tile_bytes_total"), "state"),
                    (_rate("elastic3d_checkpoint_written_bytes_total"), "new of it"),
                ),
            ),
            Panel(
                title="Writing a part, nine of ten",
                metric="elastic3d_checkpoint_write_seconds",
                unit="s",
                queries=((_share("elastic3d_checkpoint_write_seconds", 0.9), "nine of ten"),),
            ),
            Panel(
                title="Checkpoints that failed",
                metric="elastic3d_checkpoint_failures_total",
                unit="none",
                queries=((_increase("elastic3d_checkpoint_failures_total", "node"), "{{node}}"),),
            ),
            Panel(
                title="Waits for the store",
                metric="elastic3d_store_waits_total",
                unit="none",
                queries=((_increase("elastic3d_store_waits_total", "node"), "{{node}}"),),
            ),
        ),
    ),
    Section(
        title="Health",
        panels=(
            Panel(
                title="Verdicts",
                metric="elastic3d_verdicts_total",
                unit="none",
                queries=((_increase("elastic3d_verdicts_total", "kind"), "{{kind}}"),),
            ),
            Panel(
                title="Slowness of nodes",
                metric="elastic3d_node_slowness_ratio",
                unit="none",
                queries=((_one("elastic3d_node_slowness_ratio", by="node"), "{{node}}"),),
            ),
            Panel(
                title="Audits",
                metric="elastic3d_audits_total",
                unit="none",
                queries=((_increase("elastic3d_audits_total", "outcome"), "{{outcome}}"),),
            ),
        ),
    ),
    Section(
        title="etcd and processes",
        panels=(
            Panel(
                title="etcd's answers",
                metric="elastic3d_etcd_answer_seconds",
                unit="s",
                queries=(
                    (
                        f"{_rate('elastic3d_etcd_answer_seconds_sum', 'node')} / "
                        f"{_rate('elastic3d_etcd_answer_seconds_count', 'node')}",
                        "{{node}}",
                    ),
                ),
            ),
            Panel(
                title="Nodes that etcd serves",
                metric="elastic3d_etcd_up",
                unit="none",
                queries=(
                    (_one("elastic3d_etcd_up", of="sum"), "answered"),
                    (_one("elastic3d_etcd_writable", of="sum"), "may write"),
                ),
            ),
            Panel(
                title="Memory of keepers and trainers",
                metric="elastic3d_memory_bytes",
                unit="bytes",
                queries=((_one("elastic3d_memory_bytes", by="node, process", of="sum"), "{{node}} {{process}}"),),
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """Return it as Grafana reads it; KeyError where a panel is of a metric that is none."""
    return {
        "annotations": {"list": []},
        "description": "A training job under elastic3d.",
        "editable": True,
        "graphTooltip": 1,
        "panels": list(_panels()),
        "refresh": "30s",
        "schemaVersion": SCHEMA,
        "tags": ["elastic3d"],
        "templating": {"list": [_source(), _run()]},
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "title": "elastic3d",
        "uid": "elastic3d",
    }


def text() -> str:
    """Return the file's text."""
    return json.dumps(dashboard(), indent=1) + "\n"


def main() -> None:
    """Write the file."""
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(text())


def _panels() -> Iterator[dict[str, Any]]:
    number, y = 0, 0
    for section in SECTIONS:
        number += 1
        place = {"h": 1, "w": WIDTH * ACROSS, "x": 0, "y": y}
        yield {
            "collapsed": False, "gridPos": place, "id": number, "panels": [], "title": section.title, "type": "row"
        }  # fmt: skip
        y += 1
        for at, panel in enumerate(section.panels):
            number += 1
            row, column = divmod(at, ACROSS)
            yield _chart(panel, number, {"h": HEIGHT, "w": WIDTH, "x": WIDTH * column, "y": y + HEIGHT * row})
        y += HEIGHT * -(-len(section.panels) // ACROSS)


def _chart(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "datasource": _SOURCE,
        "description": METRICS[panel.metric].help,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "gridPos": place,
        "id": number,
        "targets": [
            {"datasource": _SOURCE, "expr": expression, "legendFormat": legend, "refId": chr(ord("A") + at)}
            for at, (expression, legend) in enumerate(panel.queries)
        ],
        "title": panel.title,
        "type": "timeseries",
    }


def _source() -> dict[str, Any]:
    return {"label": "Data source", "name": "source", "query": "prometheus", "type": "datasource"}


def _run() -> dict[str, Any]:
    query = "label_values(elastic3d_generation, run)"
    return {
        "datasource": _SOURCE,
        "definition": query,
        "label": "Run",
        "name": "run",
        "query": {"query": query, "refId": "run"},
        "refresh": 2,
        "sort": 1,
        "type": "query",
    }


if __name__ == "__main__":
    main()
