"""Runs with drawn schedules as JUnit XML, which build servers read."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from chaos.report.random_documents import DrawnRun, RandomDocument, RunVerdict

_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 cannot hold, in whatever form."""


def junit(document: RandomDocument) -> ElementTree.Element:
    """Return a test suite with a test case per run. What was not wholly played is skipped, never passed."""
    suite = ElementTree.Element(
        "testsuite",
        name="elastic3d chaos random",
        tests=str(len(document.runs)),
        failures=str(document.count(RunVerdict.BROKEN)),
        errors="0",
        skipped=str(document.count(RunVerdict.SKIPPED) + document.count(RunVerdict.PARTLY)),
        time=f"{document.seconds:.2f}",
    )
    for run in document.runs:
        suite.append(_case(run, document.script))
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    return suites


def write(document: RandomDocument, path: Path) -> None:
    """Write the test suite to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ElementTree.ElementTree(junit(document)).write(path, encoding="utf-8", xml_declaration=True)


def _case(run: DrawnRun, script: str) -> ElementTree.Element:
    name = f"seed {run.seed}: {run.nodes} nodes x {run.slots}: {', '.join(run.faults)}"
    case = ElementTree.Element("testcase", classname=_clean(script), name=_clean(name), time=f"{run.seconds:.2f}")
    skipped = "; ".join(f"{one.fault}: {one.why}" for one in run.skipped)
    if run.verdict is RunVerdict.BROKEN:
        broken = ElementTree.SubElement(case, "failure", type="broken promise", message=_clean(run.broken[0]))
        lines = (*run.broken, *([f"skipped: {skipped}"] if skipped else []), f"replay: {run.replay}")
        broken.text = _clean("\n".join(lines))
    elif run.verdict is not RunVerdict.KEPT:
        ElementTree.SubElement(case, "skipped", message=_clean(skipped))
    return case


def _clean(text: str) -> str:
    return _NO_XML.sub("\N{REPLACEMENT CHARACTER}", text)
