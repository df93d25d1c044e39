"""The page and its fragments, made of jobs at moments of their lives."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic3d.clock import processor_seconds
from elastic3d.dashboard.differences import difference
from elastic3d.dashboard.document import PageDocument, findings_in, generations_in, moments_of
from elastic3d.dashboard.event_files import NotableEvent
from elastic3d.dashboard.moments import Moments
from elastic3d.dashboard.page import page, policy
from elastic3d.dashboard.view import view
from elastic3d.etcd import KeyValue
from elastic3d.health.trouble import Trouble
from elastic3d.log import Level
from elastic3d.membership.inspection.derivation import status
from elastic3d.membership.inspection.keys import find
from elastic3d.membership.inspection.status import NodeRole, NodeState, NodeStatus
from elastic3d.pages.series import StepFigures, StepSeries
from elastic3d.values import Layout
from tests.cli.status import scenes
from tests.cli.status.scenes import ROOT, SCENES, WALL, Scene
from tests.cli.status.test_status import ALL, VALUES
from tests.pages.parsed import HOSTILE, assert_loads_nothing, assert_usable_without_a_mouse, parsed


def document_of(scene: Scene, moments: Moments | None = None, wall: float = WALL) -> PageDocument:
    run_keys = find(ROOT, scene.items())
    stands = status("gpt-1b", run_keys, revision=9, remaining=scene.remaining, wall=wall)
    series = StepSeries()
    for step in range(30):
        series.add(StepFigures(step=step, loss=2.5, seconds=0.5, generation=4))
    return PageDocument(
        status=stands,
        generations=generations_in(run_keys),
        findings=findings_in(run_keys),
        moments=moments_of(stands, moments or Moments(), wall),
        chunks=series.chunks(),
        newest=tuple(series.newest),
        read_at=wall,
    )


def rendered(document: PageDocument, *, orders: bool = False) -> str:
    shown = view(document, orders=orders)
    return page(shown, nonce="N0", read_at=WALL, now=WALL, when="0 s ago", orders=orders)


@pytest.mark.parametrize("name", SCENES)
def test_every_job_makes_a_page(name: str) -> None:
    """Well formed, with all its nodes, each with its state in words, and plain JSON for the stream."""
    document = document_of(SCENES[name]())
    parser = parsed(rendered(document, orders=True))
    for node in document.status.nodes:
        assert node.name in parser.text
        assert str(node.state) in parser.text
    text = json.dumps(view(document), allow_nan=False)
    assert "null" not in re.sub(r'"series".*', "", text)


def test_the_page_names_nothing_outside() -> None:
    """Its policy would refuse it: no address, no import, no handler or style in an attribute, and a nonce on both."""
    text = rendered(document_of(SCENES["stuck"]()), orders=True)
    assert_loads_nothing(text)
    assert all(attributes["nonce"] == "N0" for tag, attributes in parsed(text).seen if tag in ("script", "style"))
    begins = "default-src 'none'; script-src 'nonce-N0'; style-src 'nonce-N0'; connect-src 'self'; "
    assert policy("N0").startswith(begins)


def test_the_page_can_be_used_without_a_mouse_or_a_script() -> None:
    """Tables have headings, what scrolls can be focused and has a name, all controls have one, and ids are unique."""
    parser = parsed(rendered(document_of(SCENES["draining"]()), orders=True))
    assert_usable_without_a_mouse(parser)
    assert parser.tags.count("th") > 10
    assert "noscript" in parser.tags
    assert "still picture" in parser.text
    assert "1 249" not in parser.text


def hostile() -> PageDocument:
    document = document_of(SCENES["stuck"]())
    stands = document.status
    assert stands.generation is not None
    assert stands.verdict is not None
    bad = NodeStatus(
        name=HOSTILE,
        incarnation=HOSTILE,
        machine=HOSTILE,
        state=NodeState.QUARANTINED,
        detail=HOSTILE,
        labels={HOSTILE: HOSTILE},
        health=(HOSTILE,),
        seconds_left=3.0,
    )
    stands = replace(
        stands,
        run_id=HOSTILE,
        detail=HOSTILE,
        nodes=(*stands.nodes, bad),
        generation=replace(stands.generation, detail=HOSTILE, mesh=((HOSTILE, "a"), ("b", HOSTILE))),
        suspects=tuple(replace(one, node=HOSTILE, detail=HOSTILE) for one in stands.suspects),
        problems=(HOSTILE,),
        unvetted=HOSTILE,
    )
    return replace(
        document,
        status=stands,
        generations=tuple(
            replace(one, detail=HOSTILE, joined=(HOSTILE,), left=(HOSTILE,), layout=HOSTILE, leader=HOSTILE)
            for one in document.generations
        ),
        findings=tuple(
            replace(one, title=HOSTILE, text=f"{HOSTILE}\n{HOSTILE}", key=HOSTILE) for one in document.findings
        ),
        notables=(NotableEvent(at=1.0, name="x", level=Level.ERROR, node=HOSTILE, generation=1, said=HOSTILE),),
        problems=(HOSTILE,),
        away=HOSTILE,
    )


def test_names_and_details_from_others_are_text() -> None:
    """Whatever somebody writes into etcd or an event file: no element, no attribute, no control character of it."""
    document = hostile()
    text = rendered(document, orders=True)
    parser = parsed(text)
    assert parser.tags.count("script") == 1
    assert "img" not in parser.tags
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert parser.text.count("<script>alert(1)</script>") > 15
    shown = view(document)
    pieces = "".join([*shown["parts"].values(), *shown["nodes"]["rows"].values(), *shown["mesh"].values()])
    assert "<script" not in pieces
    assert "<img" not in pieces


@given(st.text(max_size=30), st.text(max_size=30))
def test_any_text_makes_a_well_formed_page(name: str, detail: str) -> None:
    """Also what marks a place in the page itself."""
    document = document_of(SCENES["forming"]())
    nodes = tuple(replace(node, name=name, detail=f"@@title@@{detail}") for node in document.status.nodes)
    text = rendered(replace(document, status=replace(document.status, nodes=nodes, run_id=name)))
    parsed(text).text.encode()
    assert "@@title@@" in text


@given(
    st.dictionaries(st.sampled_from([item.key for item in ALL]), st.sampled_from(VALUES), max_size=12),
    st.sets(st.sampled_from(ALL)),
    st.floats(0, 1e12),
)
@settings(max_examples=50)
def test_any_keys_make_a_page(wrong: dict[str, bytes], some: set[KeyValue], wall: float) -> None:
    """Any subset of keys with any contents: well formed, and plain JSON."""
    document = document_of(Scene(keys={**{item.key: item.value for item in some}, **wrong}), wall=wall)
    parsed(rendered(document, orders=True))
    json.dumps(view(document), allow_nan=False)


def test_nothing_changes_while_nothing_happens() -> None:
    """Though the clock goes on, and leases are read a little late: the page counts by itself."""
    scene, moments = scenes.losses(), Moments()
    before = view(document_of(scene, moments))
    for passed in (1.0, 2.3, 3.1):
        scene.remaining = {lease: left - 1.0 for lease, left in scene.remaining.items()}
        document = document_of(scene, moments, WALL + passed)
        assert difference(before, view(replace(document, read_at=WALL))) == {}


def test_troubles_that_only_events_tell_are_explained() -> None:
    """As `elastic3d explain --events` does; nonsense among them is passed over."""
    run_keys = find(ROOT, scenes.stuck().items())
    fields: dict[str, Any] = {"step": 120, "ranks": [1], "nodes": ["b"], "detail": "it computes wrongly", "clean": 100}
    lying = Trouble(event="node.lying", generation=4, at=1.0, fields=fields)
    odd = Trouble(event="loss.spiked", generation=4, at=1.0, fields={"step": "x", "loss": {}, "usual": None})
    findings = findings_in(run_keys, [lying, odd, replace(odd, fields={"step": 3, "loss": [], "usual": "y"})])
    assert [finding.generation for finding in findings] == [4, 3]
    assert "it computes wrongly" in findings[0].text
    assert "Do now" in findings[1].text


def thousand() -> PageDocument:
    document = document_of(SCENES["training"]())
    assert document.status.generation is not None
    names = [f"gpu-{number:04d}" for number in range(1000)]
    nodes = tuple(
        replace(
            document.status.nodes[0],
            name=name,
            incarnation="8c1f2a3b",
            role=NodeRole.ACTIVE,
            first_rank=8 * at,
            slots=8,
            labels={"zone": f"z{at % 3}", "rack": f"r{at % 40}", "switch": f"s{at % 80}", "host": name},
        )
        for at, name in enumerate(names)
    )
    mesh = tuple(tuple(name for name in names[stage * 50 : stage * 50 + 50] for _ in range(8)) for stage in range(20))
    generation = replace(
        document.status.generation, nodes=tuple(names), mesh=mesh, layout=Layout(pp=20, dp=400), world=8000
    )
    series = StepSeries()
    for step in range(20_000):
        series.add(StepFigures(step=step, loss=2.0 + 1 / (step + 1), seconds=0.5, generation=4))
    stands = replace(document.status, nodes=nodes, generation=generation)
    return replace(document, status=stands, chunks=series.chunks(), newest=tuple(series.newest))


def test_a_thousand_nodes_are_shown_in_time() -> None:
    """Rendering them takes a fraction of the second between two updates, and of an update only the changes are sent."""
    document = thousand()
    before = view(document)
    nodes = list(document.status.nodes)
    nodes[500] = replace(nodes[500], state=NodeState.SILENT, detail="silent: gpu-0499")
    begun = processor_seconds()
    changed = view(replace(document, status=replace(document.status, nodes=tuple(nodes), step=20_000)))
    patch = json.dumps(difference(before, changed))
    assert processor_seconds() - begun < 1.0
    assert list(difference(before, changed)["nodes"]["rows"]) == ["gpu-0500@8c1f2a3b"]
    assert len(patch) < 20_000
    assert len(json.dumps(changed)) > 300_000
