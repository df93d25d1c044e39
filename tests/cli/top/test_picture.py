"""The page of `elastic3d top` at fixed sizes: tests/testdata/top/*.txt.

`pytest tests/cli/top --rewrite-displays` writes the present output; a person reviews the diff.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic3d.cli.top.controls import Controls
from elastic3d.cli.top.nodes import COLUMNS, in_order, node_rows
from elastic3d.cli.top.picture import picture, seconds_a_step
from elastic3d.membership import actions as acts
from elastic3d.membership.records import Report
from elastic3d.pages.series import StepFigures
from tests.cli.status import scenes
from tests.cli.status.scenes import SCENES, WALL
from tests.cli.top.pages import document_of, printed
from tests.paths import DATA

SIZES = ((120, 24), (80, 16), (44, 14))
SHOWN = ("accounted", "stuck", "losses", "many", "ended", "restart", "forming")


@pytest.fixture
def greenwich(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Show times of day in UTC instead of the machine's zone."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.usefixtures("greenwich")
def test_display(name: str, request: pytest.FixtureRequest) -> None:
    """The page fits its terminal exactly and is the reviewed one; a plain picture is as long as it gets."""
    document, pictures = document_of(SCENES[name]()), []
    for width, height in (*SIZES, (80, None)):
        drawn = picture(document, Controls(), width=width, height=height, now=WALL + 3)
        text = printed(drawn.page, width, height)
        assert max(map(len, text.splitlines())) <= width
        assert height is None or len(text.splitlines()) == height
        pictures.append(f"{'-' * width}\n{text}\n")
    path, text = DATA / "top" / f"{name}.txt", "".join(pictures)
    if request.config.getoption("--rewrite-displays", default=False):
        path.write_text(text)
    assert text == path.read_text()


@given(st.sampled_from(sorted(SCENES)), st.integers(1, 200), st.integers(1, 60), st.integers(-3, 99), st.booleans())
def test_any_size_of_a_terminal_has_a_page(name: str, width: int, height: int, sort: int, reverse: bool) -> None:
    """However small, and whatever was pressed before: nothing wider, and every node is on one of the pages."""
    document = document_of(SCENES[name]())
    controls = Controls(sort=sort, reverse=reverse)
    drawn = picture(document, controls, width=width, height=height, now=WALL + 3)
    assert max(map(len, printed(drawn.page, width, height).splitlines())) <= width
    if width < 80:
        return
    texts = [
        printed(picture(document, replace(controls, page=page), width=width, height=height, now=WALL).page, width)
        for page in range(drawn.pages)
    ]
    for node in document.status.nodes:
        assert any(node.name in text for text in texts)


def test_the_page_says_how_old_it_is_and_when_etcd_is_away() -> None:
    """What was seen stays."""
    document = document_of(scenes.training())
    fresh = printed(picture(document, Controls(), width=100, now=WALL + 2).page, 100)
    assert "as of 2 s ago, a leads" in fresh
    away = replace(document, away="no endpoint answered: e1 refuses")
    old = printed(picture(away, Controls(), width=100, now=WALL + 200).page, 100)
    assert "as of 3 min 20 s ago, since etcd does not show it now: no endpoint answered: e1 refuses" in old
    assert "step 1240" in old


def test_progress_has_the_target_and_the_time_that_is_left() -> None:
    """By the mean of the steps that this generation reported last; those of others do not count."""
    document = document_of(scenes.accounted())
    assert "step 1240 of 20000, 2.04 steps/s, loss 3.25, 2 h 33 min left" in printed(
        picture(document, Controls(), width=100, now=WALL).page, 100
    )
    older = StepFigures(step=1, loss=1.0, seconds=9.0, generation=3)
    newer = [StepFigures(step=n, loss=1.0, seconds=n / 2, generation=4) for n in (1, 2, 3)]
    assert seconds_a_step(replace(document, newest=(older, *newer))) == 1.0
    assert seconds_a_step(replace(document, newest=(older,))) == 0.49


def named(rows: Any) -> list[str]:
    return [row.node.name for row in rows]


@pytest.mark.parametrize(
    ("column", "names"),
    [
        ("ranks", "abcde"),
        ("node", "abcde"),
        ("state", "abcde"),
        ("speed", "bacde"),
        ("busy", "dcabe"),
        ("snapshot", "abcde"),
        ("memory", "cabde"),
        ("last cause", "bacde"),
    ],
)
def test_nodes_stand_in_the_order_of_a_column(column: str, names: str) -> None:
    """Those of which nothing is known stand last, also the other way round."""
    rows = node_rows(document_of(scenes.accounted()))
    by = next(one for one in COLUMNS if one.name == column)
    assert named(in_order(rows, by, reverse=False)) == list(names)
    known = [row for row in in_order(rows, by, reverse=False) if by.order(row) != ()]
    assert named(in_order(rows, by, reverse=True))[: len(known)] == named(reversed(known))


def test_names_stand_as_people_count() -> None:
    """node2 before node10, whatever else is in a name."""
    names = ("node10", "node2", "node", "10", "9x", "node٣", "node2b")
    rows = [
        replace(row, node=replace(row.node, name=name), place=place)
        for place, (row, name) in enumerate(zip([node_rows(document_of(scenes.training()))[0]] * 7, names, strict=True))
    ]
    by = next(one for one in COLUMNS if one.name == "node")
    assert named(in_order(rows, by, reverse=False)) == ["node", "node2", "node2b", "node10", "node٣", "9x", "10"]


def test_nothing_of_others_reaches_the_terminal_as_a_command() -> None:
    """Names, details and errors are text, without control characters or markup."""
    scene = scenes.failed()
    scene.write(scenes.A, acts.PutReport(report=Report(incarnation="1", error="4.0", detail="[bold]\x1b]0;x")))
    text = printed(picture(document_of(scene), Controls(), width=200, now=WALL).page, 200)
    assert "\x1b" not in text
    assert "[bold]" in text
