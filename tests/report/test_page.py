"""The page of a report: a file that needs nothing else, whatever is written into it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace

from elastic3d.clock import processor_seconds
from elastic3d.pages.findings import PageFinding
from elastic3d.report.document import CheckpointTrouble, RunReport
from elastic3d.report.page import page
from elastic3d.values import to_json
from tests.accounting.written import started
from tests.pages.parsed import HOSTILE, assert_loads_nothing, assert_usable_without_a_mouse, parsed
from tests.report.reporting import WRITTEN, a_failure, reported


def a_report() -> RunReport:
    written = a_failure()
    written.sort()
    return reported({node: [json.dumps(line) for line in lines] for node, lines in written.lines.items()})


def test_the_page_needs_nothing_and_runs_nothing() -> None:
    """No script, no address, no style in an attribute; and its policy allows its own style alone."""
    text = page(a_report(), written=WRITTEN)
    assert_loads_nothing(text)
    read = parsed(text)
    assert "script" not in read.tags
    assert not {"iframe", "object", "embed", "img", "form", "base"} & set(read.tags)
    assert not [name for _, attributes in read.seen for name in attributes if name == "style"]
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    policy = next(a["content"] for tag, a in read.seen if tag == "meta" and "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert f"style-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy


def test_the_page_can_be_read_by_anybody() -> None:
    """Dark or light, on a phone, with the keyboard alone, and with a reader of screens: pictures say what they show."""
    text = page(a_report(), written=WRITTEN)
    read = parsed(text)
    assert_usable_without_a_mouse(read)
    assert "width=device-width" in text
    assert "prefers-color-scheme: dark" in text
    assert "@media (max-width: 40rem)" in text
    assert [attributes.get("href") for tag, attributes in read.seen if tag == "a"] == ["#main"]
    labels = [attributes["aria-label"] for _, attributes in read.seen if attributes.get("role") == "img"]
    assert "Loss by step: 4 at first, 4 at last, between 4 and 4" in labels


def test_the_page_tells_what_the_document_has() -> None:
    """The end, what each generation was for, the parts of recoveries, the goodput, checkpoints and what failed."""
    read = parsed(page(a_report(), written=WRITTEN))
    for part in (
        "12 steps in 23 s on 2 nodes, in 2 generations; it came to its end",
        "2023-11-14 22:13:20 UTC",
        "3 were made again",
        "8 to 12",
        "b is lost",
        "noticing 0.50 s",
        "pp 1 x dp 1 x tp 1, ZeRO-3",
        "read back: sample",
        "not committed",
        "no space left",
        "Nothing was found about this run",
    ):
        assert part in read.text, part
    kinds = {attributes.get("class") for tag, attributes in read.seen if tag == "rect"}
    assert {"c-useful", "c-repeated", "c-noticing", "c-forming", "c-preparing", "c-restoring"} <= kinds


def hostile() -> RunReport:
    """Return a report with names and texts that try to be more than text."""
    report = a_report()
    account = replace(
        report.account,
        run=HOSTILE,
        remarks=(HOSTILE,) * 40,
        nodes=tuple(replace(one, node=HOSTILE) for one in report.account.nodes),
        generations=tuple(replace(one, cause=HOSTILE) for one in report.account.generations),
    )
    return replace(
        report,
        account=account,
        error=HOSTILE,
        summary=HOSTILE,
        generations=tuple(
            replace(one, cause=HOSTILE, detail=HOSTILE, joined=(HOSTILE,), layout=HOSTILE) for one in report.generations
        ),
        recoveries=tuple(replace(one, cause=HOSTILE, node=HOSTILE, state=HOSTILE) for one in report.recoveries),
        timelines=tuple(replace(one, node=HOSTILE) for one in report.timelines),
        findings=(PageFinding(generation=1, key=HOSTILE, title=HOSTILE, text=f"{HOSTILE}\n@@style@@"),),
        checkpoints=tuple(replace(one, verified=HOSTILE) for one in report.checkpoints),
        troubles=(CheckpointTrouble(at=0, event=HOSTILE, step=None, nodes=(HOSTILE,) * 9, error=HOSTILE, times=1),),
    )


def test_names_and_texts_from_files_are_text() -> None:
    """Whatever a node is called, or its script raised: no element, no attribute, no control character of it."""
    text = page(hostile(), written=WRITTEN)
    read = parsed(text)
    assert_loads_nothing(text.replace("src=x", ""))
    assert not {"script", "img"} & set(read.tags)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert read.text.count("<script>alert(1)</script>") > 20
    assert "@@style@@" in read.text


def test_a_long_run_of_many_nodes_makes_a_page_of_bounded_size() -> None:
    """100 nodes and 2,000 steps: in seconds, a few hundred kilobytes, and --json has what the page leaves out."""
    nodes = [f"gpu-{number:03d}" for number in range(100)]
    written = started(nodes)
    at = 3.0
    for step in range(1, 2001):
        at += 1.0
        written.step(step, at, 1, nodes[0], data=0.1, copy=0.05)
    for node in nodes:
        written.say(node, at + 1, "job.ended", kind="done")
    written.sort()
    lines = {node: [json.dumps(line) for line in mine] for node, mine in written.lines.items()}
    begun = processor_seconds()
    report = reported(lines)
    text = page(report, written=WRITTEN)
    assert processor_seconds() - begun < 20.0
    assert len(text) < 3_000_000
    assert "and 36 nodes whose time was useful more" in parsed(text).text
    assert len(to_json(report)["timelines"]) == 100
    assert len(report.curve) <= 1536
