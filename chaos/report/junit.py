"""What runs have shown as JUnit XML, which build servers read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from chaos.judging.promise import Promise
from chaos.report.random_documents import DrawnRun, RandomDocument, RunVerdict
from chaos.storms.folders import in_words

_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 cannot hold, in whatever form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A test case: of those that are given, error, broken and skipped say in this order what became of it.

    error: what ended it before anything could be said. broken: what speaks against it. more: lines below that.
    skipped: why it was not wholly tried.
    """

    name: str
    seconds: float = 0.0
    broken: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    skipped: str = ""
    error: str = ""

    @property
    def became(self) -> str:
        """The name of its element, "" for a case that passed."""
        return "error" if self.error else "failure" if self.broken else "skipped" if self.skipped else ""


def junit(what: str, script: str, cases: Sequence[Case]) -> ElementTree.Element:
    """Return a test suite. what: its name. script: the file of the job's script, the class of each case."""
    became = [case.became for case in cases]
    suite = ElementTree.Element(
        "testsuite",
        name=what,
        tests=str(len(cases)),
        failures=str(became.count("failure")),
        errors=str(became.count("error")),
        skipped=str(became.count("skipped")),
        time=f"{sum(case.seconds for case in cases):.2f}",
    )
    suite.extend(_element(case, script) for case in cases)
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    return suites


def begin(path: Path, what: str, script: str) -> None:
    """Write a test suite that says of itself that it has not come to its end; UsageError where that fails.

    It stays if nothing takes its place: what an earlier run wrote is not taken for what this one has shown.
    """
    write(path, what, script, [Case(name="it comes to its end", error="it did not: what it printed says why")])


def write(path: Path, what: str, script: str, cases: Sequence[Case]) -> None:
    """Write the test suite to a file; UsageError where that fails."""
    with in_words(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        ElementTree.ElementTree(junit(what, script, cases)).write(path, encoding="utf-8", xml_declaration=True)


def drawn_cases(document: RandomDocument) -> Iterator[Case]:
    """Yield a case per run, and one of what ended them early. What was not wholly played is skipped, never passed."""
    for run in document.runs:
        yield _drawn_case(run)
    if document.early:
        yield Case(name="all runs are played", error=document.early)


def promise_cases(promises: Sequence[Promise], more: tuple[str, ...] = ()) -> Iterator[Case]:
    """Yield a case per promise; one that was not judged is skipped. more: lines below each that was broken."""
    for one in promises:
        skipped = "" if one.judged else f"not judged: {one.seen}"
        yield Case(name=one.says, broken=one.broken, more=(f"promised by docs/{one.page}", *more), skipped=skipped)


def _drawn_case(run: DrawnRun) -> Case:
    skipped = "; ".join(f"{one.fault}: {one.why}" for one in run.skipped)
    more = [f"skipped: {skipped}"] if skipped else []
    more += [f"replay: {run.replay}"] if run.replay else []
    return Case(
        name=f"seed {run.seed}: {run.nodes} nodes x {run.slots}: {', '.join(run.faults)}",
        seconds=run.seconds,
        broken=run.broken,
        more=(*more, *([run.unkept] if run.unkept else [])),
        skipped="" if run.verdict is RunVerdict.KEPT else skipped,
        error=run.error,
    )


def _element(case: Case, script: str) -> ElementTree.Element:
    made = ElementTree.Element("testcase", classname=_clean(script), name=_clean(case.name), time=f"{case.seconds:.2f}")
    if case.became == "failure":
        broken = ElementTree.SubElement(made, "failure", type="broken promise", message=_clean(case.broken[0]))
        broken.text = _clean("\n".join((*case.broken, *case.more)))
    elif case.became == "error":
        ElementTree.SubElement(made, "error", type="ended early", message=_clean(case.error))
    elif case.became == "skipped":
        ElementTree.SubElement(made, "skipped", message=_clean(case.skipped))
    return made


def _clean(text: str) -> str:
    return _NO_XML.sub("\N{REPLACEMENT CHARACTER}", text)
