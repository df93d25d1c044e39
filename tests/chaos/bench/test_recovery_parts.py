"""The parts of a recovery, from made-up events: they add up, and each event is where one part ends."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from chaos.bench import recovery_parts
from chaos.bench.recovery_parts import FIRST_STEP, FORKING, LEAVING, NOTICING, SEALING, of_death, of_join, of_peer
from chaos.history.follow import Event
from tests.chaos.made_up_events import a_death_and_a_join, event

KILLED = 11.95
PARTS = [["groups", 0.1, 0.02], ["building", 0.2, 0.15], ["loading", 0.05, 0.04]]


def history() -> list[Event]:
    """Return made-up events whose trainers say where their time went."""
    events = [
        replace(one, fields={**one.fields, "parts": PARTS}) if one.name == "state.restored" else one
        for one in a_death_and_a_join()
    ]
    return [
        replace(one, fields={**one.fields, "processor": 0.3}) if one.name == "step.committed" else one for one in events
    ]


def test_the_parts_of_a_death_add_up_to_it() -> None:
    """From the kill: noticed at 12.05, sealed at 12.1, the trainer began 0.35 s before 12.6, first step at 13.0."""
    recovered = of_death(history(), KILLED)
    assert recovered is not None
    seconds = {part.name: part.seconds for part in recovered.parts}
    assert list(seconds) == [NOTICING, SEALING, FORKING, "groups", "building", "loading", FIRST_STEP]
    expected = (0.1, 0.05, 0.15, 0.1, 0.2, 0.05, 0.4)
    assert tuple(seconds.values()) == pytest.approx(expected)
    assert recovered.seconds == pytest.approx(13.0 - KILLED)
    assert recovered.beyond == pytest.approx(13.0 - KILLED - 0.4)
    building = recovered.part("building")
    assert building is not None
    assert building.processor == 0.15
    assert recovered.step_processor == 0.3


def test_a_join_counts_from_the_last_step_without_the_newcomer() -> None:
    """What its trainers prepared beside the others is no part of the pause."""
    joined = of_join(history())
    assert joined is not None
    assert [part.name for part in joined.parts] == [LEAVING, "loading", FIRST_STEP]
    assert joined.seconds == pytest.approx(14.3 - 13.4)
    assert joined.parts[0].seconds == pytest.approx(14.0 - 0.05 - 13.4)


def test_a_job_that_does_not_go_on_has_no_parts() -> None:
    """Neither has one whose trainers never had their state."""
    events = history()
    assert of_death(events[:6], KILLED) is None
    assert of_death(events[:8], KILLED) is None
    assert of_join(events[:11]) is None


def test_a_median_step_is_of_the_layout_that_recovered() -> None:
    """Three nodes take longer for a step than four did."""
    events = history()
    slower = [event("step.committed", 13.4 + n, generation=2, rank=0, seconds=0.9) for n in range(4)]
    recovered = of_death([*events[:9], *slower], KILLED)
    assert recovered is not None
    assert recovered.step == 0.9


def test_a_peers_marks_are_its_parts() -> None:
    """The first begins at the kill; without marks there is nothing to divide."""
    marks = [{"name": "noticing", "at": 13.0}, {"name": "importing", "at": 15.0}, {"name": FIRST_STEP, "at": 15.5}]
    recovered = of_peer(marks, 10.0, step=0.25)
    assert recovered is not None
    assert [(part.name, part.seconds) for part in recovered.parts] == [
        ("noticing", 3.0),
        ("importing", 2.0),
        (FIRST_STEP, 0.5),
    ]
    assert recovered.beyond == 5.25
    assert of_peer([], 10.0, step=0.25) is None


def test_the_table_shows_all_systems_and_those_that_never_recovered() -> None:
    """Parts in the order in which they come, with the time beyond a median step."""
    ours = of_death(history(), KILLED)
    marks = [{"name": "noticing", "at": 13.0}, {"name": "importing", "at": 15.0}, {"name": FIRST_STEP, "at": 15.5}]
    console = Console(file=io.StringIO(), width=200)
    peers = [of_peer(marks, 10.0, step=0.25), None]
    console.print(recovery_parts.table("a kill", {"elastic3d": [ours], "a peer": peers}))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    names = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert names == [
        NOTICING,
        SEALING,
        FORKING,
        "importing",
        "groups",
        "building",
        "loading",
        FIRST_STEP,
        "first step beyond a median one",
        "a median step",
        "in all",
        "in all, beyond a median step",
    ]
    text = console.file.getvalue()
    assert "0.20 s (0.20 to 0.20), of processor 0.15 s" in text
    assert "5.25 s (5.25 to 5.25), 1 of 2 never" in text
