"""Schedules are written and read back equal, and what is wrong with one is said, and where."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import typing
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.faults.catalogue import KINDS
from chaos.faults.etcd import EtcdPause
from chaos.faults.fault import Fault
from chaos.faults.moment import Phase, When
from chaos.faults.orders import Join
from chaos.faults.process import Kill, Pause
from chaos.machine.processes import Part
from chaos.schedules.files import load, parse, to_document, to_json, to_toml
from chaos.schedules.schedule import Schedule
from elastic3d.errors import UsageError
from elastic3d.log import EVENTS

numbers = st.integers(min_value=0, max_value=10**9)
texts = {
    "node": st.sampled_from(("node0", "node12", "leader", "stage0", "rank3")),
    "method": st.sampled_from(("", "GET", "PUT")),
}
moments = st.builds(
    When,
    step=numbers,
    generation=numbers,
    phase=st.none() | st.sampled_from(Phase),
    event=st.just("") | st.sampled_from(sorted(EVENTS)),
    count=st.integers(min_value=1, max_value=99),
)


def of_kind(kind: type[Fault]) -> st.SearchStrategy[Fault]:
    """Return faults of a kind with any values of the right types."""
    hints = typing.get_type_hints(kind)
    values: dict[str, st.SearchStrategy[Any]] = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if field.name == "when":
            values["when"] = moments
        elif isinstance(hint, type) and issubclass(hint, StrEnum):
            values[field.name] = st.sampled_from(list(hint))
        elif hint is str:
            values[field.name] = texts[field.name]
        elif hint is float:
            values[field.name] = st.floats(allow_nan=False, allow_infinity=False)
        else:
            values[field.name] = numbers
    return st.builds(kind, **values)


schedules = st.builds(
    Schedule,
    faults=st.lists(st.sampled_from(list(KINDS.values())).flatmap(of_kind), min_size=1, max_size=5).map(tuple),
    seed=st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
)


@given(schedule=schedules)
def test_a_schedule_is_read_back_as_it_was_written(schedule: Schedule) -> None:
    """In TOML and in JSON, every value of every kind."""
    assert parse(tomllib.loads(to_toml(schedule)), "toml", nodes=4) == schedule
    assert parse(json.loads(to_json(schedule)), "json", nodes=4) == schedule


def test_a_schedule_as_people_write_it(tmp_path: Path) -> None:
    """Steps, generations with phases, events, and values of a fault's own."""
    path = tmp_path / "storm.toml"
    path.write_text(
        """
        [[fault]]
        do = "kill"
        node = "leader"
        at = {step = 20}

        [[fault]]
        do = "pause"
        node = "node2"
        part = "keepers"
        seconds = 1
        at = {generation = 2, phase = "started"}

        [[fault]]
        do = "join"
        at = {event = "peer.lost", count = 2}
        """
    )
    schedule = load(path, nodes=4)
    assert schedule.faults == (
        Kill(node="leader", when=When(step=20)),
        Pause(node="node2", part=Part.KEEPERS, seconds=1.0, when=When(generation=2, phase=Phase.STARTED)),
        Join(when=When(event="peer.lost", count=2)),
    )
    again = tmp_path / "storm.json"
    again.write_text(json.dumps(to_document(schedule)))
    assert load(again, nodes=4) == schedule


@pytest.mark.parametrize("name", ["storm.toml", "storm.json"])
def test_a_schedule_may_begin_with_a_mark_of_its_encoding(name: str, tmp_path: Path) -> None:
    """As some editors write it."""
    path = tmp_path / name
    text = (
        '{"fault": [{"do": "join", "at": {"step": 3}}]}'
        if name.endswith("json")
        else "fault = [{do = 'join', at = {step = 3}}]"
    )
    path.write_text(text, encoding="utf-8-sig")
    assert load(path, nodes=4).faults == (Join(when=When(step=3)),)


def test_what_is_left_open_is_drawn_from_the_seed() -> None:
    """The same one of the same seed, whatever else is in the schedule; of the one that it has, or of 17, by default."""
    kill = {"do": "kill", "node": "any", "at": {"step": [10, 40]}}
    drawn = [parse({"fault": [kill]}, "s", nodes=4, seed=seed) for seed in range(20)]
    assert drawn == [parse({"fault": [kill]}, "s", nodes=4, seed=seed) for seed in range(20)]
    assert len({str(one) for one in drawn}) > 10
    assert all(10 <= one.faults[0].when.step <= 40 for one in drawn)
    both = parse({"fault": [kill, {"do": "join", "at": {"step": 3}}]}, "s", nodes=4, seed=7)
    assert (both.faults[0], both.seed) == (drawn[7].faults[0], 7)
    assert parse({"fault": [kill]}, "s", nodes=4) == drawn[17]
    assert parse({"seed": 3, "fault": [kill]}, "s", nodes=4) == drawn[3]
    assert parse({"seed": 3, "fault": [kill]}, "s", nodes=4, seed=0) == drawn[0]
    assert parse({"fault": [{"do": "join", "at": {"step": 3}}]}, "s", nodes=4).seed is None


def test_what_takes_real_time_is_known() -> None:
    """It cannot be replayed exactly."""
    pause = EtcdPause(seconds=2.0, when=When(step=3))
    schedule = Schedule(faults=(Kill(node="node1", when=When(step=3)), pause))
    assert schedule.inexact == (pause,)


KILL = {"do": "kill", "node": "node1", "at": {"step": 3}}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "a schedule is a table"),
        ({}, r"there is no \[\[fault\]\] in it"),
        ({"fault": {"do": "kill"}}, r"must be a list of tables"),
        ({"faults": [KILL]}, "there is no `faults`; did you mean 'fault'"),
        ({"seed": "7", "fault": [KILL]}, "seed must be a whole number, and is '7'"),
        ({"fault": [{**KILL, "do": "kil"}]}, "fault 1: there is no fault 'kil'; did you mean 'kill'"),
        ({"fault": [{"node": "node1", "at": {"step": 3}}]}, "fault 1: it has no `do`"),
        ({"fault": [KILL, {"do": "kill", "at": {"step": 3}}]}, r"fault 2 \(kill\): it needs `node`"),
        ({"fault": [{"do": "kill", "node": "node1"}]}, r"it has no moment; give one, such as at = \{step = 20\}"),
        ({"fault": [{**KILL, "at": 3}]}, "it has no moment"),
        ({"fault": [{**KILL, "at": {"seconds": 3}}]}, "at: there is no `seconds`"),
        ({"fault": [{**KILL, "at": {"step": "3"}}]}, "at.step must be a whole number, and is '3'"),
        ({"fault": [{**KILL, "at": {"step": True}}]}, "at.step must be a whole number, and is True"),
        ({"fault": [{**KILL, "at": {"step": [9, 3]}}], "seed": 1}, r"at.step is \[9, 3\]"),
        ({"fault": [{**KILL, "at": {"step": [0, 9]}}], "seed": 1}, r"at.step is \[0, 9\]"),
        ({"fault": [KILL], "seed": 10**300}, "seed must be a whole number of 64 bits"),
        ({"fault": [{**KILL, "at": {"generation": 2, "phase": "late"}}]}, "at.phase is 'late'; give one of sealed, "),
        ({"fault": [{**KILL, "nodes": 3}]}, "there is no `nodes`; did you mean 'node'"),
        ({"fault": [{**KILL, "do": "pause", "part": "all"}]}, "part is 'all'; give one of agent, keepers"),
        ({"fault": [{**KILL, "do": "pause", "seconds": "1"}]}, "seconds must be a number, and is '1'"),
        ({"fault": [{**KILL, "do": "pause", "seconds": math.inf}]}, "seconds must be a finite number"),
        ({"fault": [{**KILL, "do": "squeeze", "room": -math.inf}]}, "room must be a finite number"),
        ({"fault": [{**KILL, "do": "throttle", "share": math.nan}]}, "share must be a finite number"),
        ({"fault": [{**KILL, "do": "drain", "seconds": 10**400}]}, "seconds must be a finite number"),
        ({"fault": [{**KILL, "do": "kill-keeper", "slot": 1}]}, "there is no `slot`"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(document: Any, message: str) -> None:
    """The file, the number of the fault and its word, what it is and what it should be."""
    with pytest.raises(UsageError, match=message) as error:
        parse(document, "storm.toml", nodes=4)
    assert str(error.value).startswith("storm.toml")


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    """What is not there, no text, or of another format."""
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        load(tmp_path / "none.toml", nodes=4)
    for text in ("][", f"a = {'[' * 100_000}", "[" * 100_000):
        for name, message in (("a.toml", "it is no TOML"), ("a.json", "it is no JSON")):
            (tmp_path / name).write_text(text)
            with pytest.raises(UsageError, match=message):
                load(tmp_path / name, nodes=4)
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="it is no text"):
        load(tmp_path / "b.toml", nodes=4)


@pytest.mark.parametrize(
    "text",
    [
        f'{{"fault": [{json.dumps(KILL)}], "fault": [{json.dumps(KILL)}]}}',
        '{"fault": [{"do": "kill", "node": "node1", "node": "node2", "at": {"step": 3}}]}',
    ],
)
def test_no_name_is_there_twice(text: str, tmp_path: Path) -> None:
    """JSON would let the last one count alone, and the faults of the first would never be made."""
    (tmp_path / "storm.json").write_text(text)
    with pytest.raises(UsageError, match=r"storm\.json: it is no JSON: `(fault|node)` is there twice"):
        load(tmp_path / "storm.json", nodes=4)
