"""A folder of a run as the report's source and its place."""

from __future__ import annotations

import json
from pathlib import Path

from chaos.report.facts import SCHEMA, RunFacts
from chaos.report.page import page
from elastic3d.errors import UsageError
from elastic3d.values import from_json

PICTURE, REPORT = "picture.json", "report.html"


def write_report(folder: Path) -> Path:
    """Make the page of a folder from what is kept in it, and return its path; UsageError where it is no such folder."""
    path = folder / REPORT
    text = page(kept_facts(folder), str(folder))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: it cannot be written: {error.strerror}") from None
    return path


def kept_facts(folder: Path) -> RunFacts:
    """Return what a folder keeps of its run."""
    path = folder / PICTURE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        kept = from_json(RunFacts, data)
    except OSError as error:
        raise UsageError(f"{folder}: no report can be made of it: {PICTURE}: {error.strerror}") from None
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path}: it is no picture of a run: {error}") from None
    if kept.schema != SCHEMA:
        raise UsageError(f"{path}: its schema is {kept.schema}, and {SCHEMA} is known here")
    return kept
