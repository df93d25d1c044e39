"""The pages of the reference that are written from the code: the command line, events, metrics, faults, JSON documents.

    python -m tools.reference

They are committed, so that they can be read without being built; tests/docs/test_reference.py holds them to the code.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import typer
import typer.main

from chaos.commands import listing
from chaos.report.random_documents import RandomDocument, ShrunkDocument
from chaos.storms import bugs
from elastic3d import log
from elastic3d.accounting.goodput import Goodput
from elastic3d.calibration.comparison import Comparison
from elastic3d.cli import application
from elastic3d.cli.ckpt.documents import CheckpointDocument
from elastic3d.cli.etcd.copies import EtcdRestored, EtcdSnapshot
from elastic3d.cli.etcd.up import EtcdUp
from elastic3d.cli.init import InitDocument
from elastic3d.cli.islands_documents import IslandsDocument
from elastic3d.cli.plan.documents import PlanDocument
from elastic3d.cli.samples_documents import (
    CheckpointSamplesDocument,
    EventSamplesDocument,
    SamplesDocument,
    SourceSamplesDocument,
)
from elastic3d.dashboard.document import PageDocument
from elastic3d.doctor.findings import Examination
from elastic3d.etcd_server.status import ServersStatus
from elastic3d.health.explanation import Explanation
from elastic3d.membership.inspection.status import Status
from elastic3d.membership.records import GenerationHistory
from elastic3d.metrics import table
from elastic3d.metrics.metric import COMMON
from elastic3d.report.document import RunReport
from elastic3d.values import written_fields

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "reference"
CHECKPOINTS: tuple[type[Any], ...] = typing.get_args(CheckpointDocument)


def command_line() -> str:
    """Return the page of the command line, from what `--help` is made of."""
    lines = [
        "# Command line",
        "",
        "Written from the help texts by `make reference`. Training jobs themselves are started with `torchrun`; see",
        "[A cluster of your own](../guides/cluster.md).",
        "",
        "Exit codes: 0; 2 for a wrong call, with nothing changed; 3 where there is no such job; 1 for everything else.",
    ]
    root = typer.main.get_command(application())
    for path, command in _commands(root, ()):
        context = typer.Context(command, info_name=" ".join(("elastic3d", *path)))
        if path:
            usage = " ".join(command.collect_usage_pieces(context))
            lines += ["", f"## {context.info_name}", "", "```", f"{context.info_name} {usage}".strip(), "```"]
        lines += ["", _cleaned(command.help)] if command.help else []
        rows = list(_parameters(command, context))
        if rows:
            lines += ["", "| | |", "|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    # A click command, from whichever click typer uses.
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        if not child.hidden:
            yield from _commands(child, (*path, name))


def _parameters(command: Any, context: typer.Context) -> Iterator[str]:
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is not None and "--help" not in parameter.opts:
            # Typer escapes brackets for the terminal.
            text = _cell(record[1].replace("\\[", "["))
            yield f"| `{_cell(record[0])}` | {text.replace('<', '&lt;')} |"


def _cell(text: str) -> str:
    """Return text as one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def _cleaned(text: str) -> str:
    return inspect.cleandoc(text).replace("\b\n", "").replace("Examples:", "**Examples**")


def events() -> str:
    """Return the page of the events, from the list in elastic3d/log.py and the comments there."""
    lines = [
        "# Events",
        "",
        'With `elastic3d.run(..., events="folder")` every node writes JSON lines, one event each. This list is written',
        "from `elastic3d/log.py` by `make reference`. Each line has `event`, `at` (wall clock, in seconds since the",
        "epoch) and, where they are known, "
        + ", ".join(f"`{name}`" for name in log.BOUND)
        + ". Fields that are `null`",
        "were not known. Losses and norms are `float.hex()` text, for they must survive bit for bit. A node",
        'keeps `events_limit="1GB"` of events: past half of it the file is renamed to `<node>-0.jsonl.1`.',
        "",
        "What people should know of them goes to stderr, a line each with its level: `ELASTIC3D_LOG=debug` shows all,",
        "`info`, the default, what matters, and `json` the latter as JSON. stdout stays the script's own.",
        "",
        "| event | level | fields | |",
        "|---|---|---|---|",
    ]
    comments = _comments(inspect.getsource(log))
    for name, kind in log.EVENTS.items():
        fields = ", ".join(f"`{field}`" for field in kind.fields)
        lines.append(f"| `{name}` | {kind.level.name.lower()} | {fields} | {_cell(comments[name])} |")
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """Return the page of the metrics, from the table in elastic3d/metrics/table.py."""
    lines = [
        "# Metrics",
        "",
        'With `elastic3d.run(..., metrics=":9464")` every node serves these for Prometheus, with `telemetry="otlp"` it',
        "sends them to a collector of OpenTelemetry, by its names; see [Metrics and alerts](../guides/metrics.md).",
        "Written from `elastic3d/metrics/table.py` by `make reference`.",
        "",
        "Every sample has the labels " + " and ".join(f"`{name}`" for name in COMMON) + ": torchrun's",
        "`--rdzv-id`, and the node's name. A histogram has `_bucket`, `_sum` and `_count`, a summary the last two.",
        "Counters begin at 0 for all values of their labels. What only one node of a job counts may be added up over",
        "its nodes. A metric whose value is not known is left out.",
        "",
        "| metric | type | labels | from | |",
        "|---|---|---|---|---|",
    ]
    for metric in table.METRICS.values():
        labels = "; ".join(
            f"`{label.name}`" + (": " if label.values else "") + ", ".join(f"`{value}`" for value in label.values)
            for label in metric.labels
        )
        events = sorted({f"`{rule.event}`" for rule in metric.rules})
        counted = f" Event{'s' * (len(events) > 1)}: {', '.join(events)}." if events else ""
        text = _cell((metric.help + counted).replace("<", "&lt;"))
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.source} | {text} |")
    return "\n".join(lines) + "\n"


def _comments(source: str) -> dict[str, str]:
    """Return the comment that stands right above each event of the list, "" for none."""
    comments: dict[str, str] = {}
    above: list[str] = []
    for line in source.splitlines():
        text = line.strip()
        if text.startswith("# "):
            above.append(text[2:])
            continue
        match = re.match(r'"([a-z_]+\.[a-z_]+)": ', text)
        if match:
            comments[match[1]] = " ".join(above)
        above = []
    return comments


def documents() -> str:
    """Return the page of the JSON documents, from the dataclasses they are made of."""
    lines = [
        "# JSON documents",
        "",
        "Every command that takes `--json` prints one document with a `schema` of 1, or one object a line while it",
        "follows a job. Written from the code by `make reference`.",
        "",
        "`elastic3d status --json` prints [`Status`](#status) and its `schema`; `elastic3d events --json` prints",
        "`schema`, `run_id` and `generations`, a list of [`GenerationHistory`](#generationhistory).",
        "`elastic3d doctor --json` prints [`Examination`](#examination) and its `schema`, `elastic3d explain --json`",
        "[`Explanation`](#explanation) and its, `elastic3d goodput --json` [`Goodput`](#goodput) and its,",
        "`elastic3d report --json` [`RunReport`](#runreport) and its, `elastic3d top --json`",
        "[`PageDocument`](#pagedocument) and its.",
        "",
        "`elastic3d ckpt ... --json` prints the `schema`, the `store` and the fields of",
        "the document that is named after the command:",
        "",
        *(f"- [`{kind.__name__}`](#{kind.__name__.lower()})" for kind in CHECKPOINTS),
        "",
        'Numbers that JSON cannot express are texts: "inf", "-inf", "nan".',
        "",
        "`elastic3d plan --json` prints the `schema` and a [`PlanDocument`](#plandocument), `elastic3d init --json` an",
        "[`InitDocument`](#initdocument). `elastic3d calibrate --compare FILE --json` prints the `schema` and a",
        "[`Comparison`](#comparison). `elastic3d etcd up --json` prints the `schema` and an",
        "[`EtcdUp`](#etcdup) once it serves, `etcd status --json` a [`ServersStatus`](#serversstatus),",
        "`etcd backup --json` an [`EtcdSnapshot`](#etcdsnapshot),",
        "`etcd restore --json` an [`EtcdRestored`](#etcdrestored).",
        "",
        "`elastic3d samples check --json` prints the `schema`, a [`SamplesDocument`](#samplesdocument) and",
        "of a store a [`CheckpointSamplesDocument`](#checkpointsamplesdocument), of event files an",
        "[`EventSamplesDocument`](#eventsamplesdocument), all in one object.",
        "`elastic3d islands show --json` prints the `schema` and an [`IslandsDocument`](#islandsdocument).",
        "",
        "`elastic3d chaos random --json` prints the `schema` and a [`RandomDocument`](#randomdocument),",
        "`elastic3d chaos shrink --json` the `schema` and a [`ShrunkDocument`](#shrunkdocument).",
    ]
    seen: dict[type[Any], None] = dict.fromkeys(
        (
            Status,
            GenerationHistory,
            Examination,
            Explanation,
            Goodput,
            RunReport,
            PageDocument,
            *CHECKPOINTS,
            PlanDocument,
            InitDocument,
            Comparison,
            EtcdUp,
            ServersStatus,
            EtcdSnapshot,
            EtcdRestored,
            SamplesDocument,
            CheckpointSamplesDocument,
            SourceSamplesDocument,
            EventSamplesDocument,
            IslandsDocument,
            RandomDocument,
            ShrunkDocument,
        )
    )
    queue = list(seen)
    while queue:
        kind = queue.pop(0)
        lines += ["", f"## {kind.__name__}", "", inspect.cleandoc(kind.__doc__ or "")]
        if issubclass(kind, Enum):
            lines += ["", "One of " + ", ".join(f"`{member.value}`" for member in kind) + "."]
            continue
        lines += ["", "| field | type | |", "|---|---|---|"]
        hints, docs = typing.get_type_hints(kind), _docstrings(kind)
        for field in written_fields(kind):
            used = [part for part in _classes(hints[field.name]) if part not in seen]
            seen.update(dict.fromkeys(used))
            queue += used
            lines.append(f"| `{field.name}` | {_named(hints[field.name])} | {_cell(docs.get(field.name, ''))} |")
    return "\n".join(lines) + "\n"


def _docstrings(kind: type) -> dict[str, str]:
    """Return the docstring right below each field of a class, if there is one."""
    body = ast.parse(inspect.cleandoc(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: text.value.value
        for field, text in zip(body.body, body.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _classes(hint: Any) -> Iterator[type[Any]]:
    """Return the classes of ours that a type is made of."""
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, Enum)):
        yield hint
    for part in typing.get_args(hint):
        yield from _classes(part)


def _named(hint: Any) -> str:
    """Return the name of a type in JSON."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_named(part) for part in parts)
    if origin in (tuple, list):
        return "list of " + _named(parts[0])
    if origin in (dict, Mapping):
        return "object of " + _named(parts[1])
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, Enum)):
        return f"[`{hint.__name__}`](#{hint.__name__.lower()})"
    names = {str: "text", int: "integer", float: "number", bool: "boolean", type(None): "`null`", Any: "any"}
    return names[hint]


PAGES: Mapping[str, Callable[[], str]] = {
    "cli.md": command_line,
    "events.md": events,
    "metrics.md": metrics,
    "faults.md": listing.page,
    "bugs-found.md": bugs.page,
    "json.md": documents,
}
"""The generator of each page."""


def main() -> None:
    """Write all pages."""
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())


if __name__ == "__main__":
    main()
