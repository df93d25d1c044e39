"""What was found about a job, each with the page that `elastic3d explain` prints. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic3d.health.explanation import Formed, explain, page
from elastic3d.health.past_verdicts import PastVerdict
from elastic3d.health.trouble import Trouble, explain_trouble, orderly, trouble_page
from elastic3d.pages.markup import Html, block, join, tag

_ODD = (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError)
"""What explaining raises on a record or event whose fields are not such as elastic3d writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFinding:
    """What was found about a generation."""

    generation: int
    """Its number."""
    key: str
    """What names this finding among those of a page."""
    title: str
    """What it was, in a line."""
    text: str
    """The page that `elastic3d explain` prints."""


def findings(
    verdicts: Iterable[tuple[str, PastVerdict]],
    troubles: Iterable[Trouble],
    *,
    formed: Sequence[Formed],
    ended: str,
    most: int,
) -> tuple[PageFinding, ...]:
    """Return at most `most` findings, the newest first.

    verdicts: each with its key. formed: the job's generations, oldest first. ended: why the job failed, "" if not.
    """
    rows: list[tuple[tuple[int, int, float], PageFinding]] = []
    for key, one in verdicts:
        try:
            explanation = explain(one.verdict, formed=formed, ended=ended, stalls=one.stalls, evidence=one.evidence)
            said = page(explanation)
        except _ODD:
            continue  # a record that somebody else wrote
        order = (explanation.generation, explanation.step, float(explanation.attempt))
        rows.append((order, _finding(f"verdict/{key}", explanation.generation, explanation.fault, said)))
    ordered = sorted(filter(orderly, troubles), key=lambda one: one.moment)
    for trouble in ordered[-most:]:
        try:
            explanation = explain_trouble(trouble, ordered, formed=formed, ended=ended)
            said = trouble_page(explanation)
        except _ODD:
            continue
        key = f"{trouble.event}/{trouble.generation}/{trouble.step}/{trouble.at:.3f}"
        rows.append((trouble.moment, _finding(key, trouble.generation, explanation.fault, said)))
    rows.sort(key=lambda row: row[0], reverse=True)
    return tuple(finding for _, finding in rows[:most])


def cards(shown: Sequence[PageFinding], nothing: str) -> Html:
    """Return findings to be opened one by one. nothing: what is said where there are none."""
    if not shown:
        return tag("p", nothing)
    return join(
        *(
            tag(
                "details",
                tag("summary", tag("b", f"Generation {finding.generation} "), finding.title),
                block(finding.text),
                id=f"finding-{finding.key}",
            )
            for finding in shown
        )
    )


def _finding(key: str, generation: int, fault: str, said: str) -> PageFinding:
    lines = said.splitlines()
    title = next((line.strip() for line in lines[1:] if line.strip()), fault)
    return PageFinding(generation=generation, key=key, title=f"{fault}: {title}" if fault else title, text=said)
