"""The catalogue of faults: what it says of each kind is true of the documentation, of the events and of schedules."""

from __future__ import annotations

import dataclasses
import re
import tomllib
import typing
from enum import StrEnum
from typing import Any

import pytest

from chaos.faults.catalogue import KINDS, feasible, form, kind_of, summary
from chaos.faults.device import SlowBlocks
from chaos.faults.fault import Fault, Need
from chaos.faults.memory import Squeeze
from chaos.faults.moment import When
from chaos.faults.network import Cut, Narrow
from chaos.faults.process import Kill, KillCompanion, KillTrainer
from chaos.faults.store import StoreGone
from chaos.schedules.files import parse
from elastic3d.errors import UsageError
from elastic3d.log import EVENTS
from tests.paths import ROOT

every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.WORD)


def failures() -> list[str]:
    """Return the first cells of the table of failures."""
    text = (ROOT / "docs" / "reference" / "failures.md").read_text()
    return [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if line.startswith("| ")]


@every_kind
def test_what_is_promised_stands_in_the_documentation(kind: type[Fault]) -> None:
    """In a row of the table of failures, word for word, or on another page."""
    about = kind.ABOUT
    assert (ROOT / "docs" / about.page).exists()
    if about.page == "reference/failures.md":
        assert about.row in failures()
    else:
        assert not about.row


@every_kind
def test_a_detector_is_an_event(kind: type[Fault]) -> None:
    """Whoever notices writes an event of the list; where nobody may notice there is no bar."""
    assert not kind.ABOUT.detector or kind.ABOUT.detector in EVENTS
    assert not kind.ABOUT.bar or kind.ABOUT.detector


@every_kind
def test_a_kind_says_what_happens(kind: type[Fault]) -> None:
    """In one sentence, and of nobody else's docstring."""
    assert summary(kind).endswith(".")
    assert "(" not in summary(kind).split()[0], f"{kind.__name__} has no docstring of its own"


def test_the_guide_names_the_faults_that_nobody_is_blamed_for() -> None:
    """Every kind of which nothing says whose fault it is, and no other."""
    text = (ROOT / "docs" / "guides" / "chaos.md").read_text()
    _, _, listed = text.partition("are events that the undisturbed run has as well, schedules")
    named = re.findall(r"`([a-z-]+)`", listed.partition("of which")[0])
    assert named == [kind.WORD for kind in KINDS.values() if kind.ABOUT.spreads]


def test_words_are_the_kinds_own() -> None:
    """No word twice, and each of letters and hyphens."""
    assert len({id(kind) for kind in KINDS.values()}) == len(KINDS)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", word) for word in KINDS)


@every_kind
def test_the_form_of_a_kind_is_one_that_a_schedule_takes(kind: type[Fault]) -> None:
    """With the value of each field that has one."""
    table = tomllib.loads(f"[[fault]]\n{form(kind).replace(', ', chr(10)).replace('{step = 20}', '{step = 20}')}\n")
    (fault,) = parse(table, "form", nodes=4).faults
    assert type(fault) is kind
    assert fault.when == When(step=20)
    assert [f.name for f in dataclasses.fields(kind) if f.name not in ("when", *table["fault"][0])] == []


@every_kind
def test_two_faults_that_differ_are_told_apart(kind: type[Fault]) -> None:
    """Reports, documents and what shrinking leaves name a fault by its printed form: it says each value."""
    hints = typing.get_type_hints(kind)
    given: dict[str, Any] = {"when": When(step=3), **({"node": "node1"} if "node" in hints else {})}
    one = kind(**given)
    for field in dataclasses.fields(kind):
        for other in others(field.name, hints[field.name], getattr(one, field.name, None)):
            assert str(dataclasses.replace(one, **{field.name: other})) != str(one), f"{field.name} = {other}: {one}"


def others(name: str, hint: Any, value: Any) -> list[Any]:
    """Return other values of a field."""
    some: dict[str, list[Any]] = {"when": [When(step=4)], "node": ["node2", "leader"], "method": ["GET", "PUT", ""]}
    words: list[Any] = [*hint] if issubclass(hint, StrEnum) else []
    known = some.get(name) or words or [hint(2 * value + 1), hint(value + 1)]
    return [one for one in known if one != value]


def test_a_fault_is_printed_with_what_it_does() -> None:
    """As schedules have its values, or in words."""
    when = When(step=5)
    assert str(Kill(node="node1", when=when)) == "kill node1@5"
    assert str(KillTrainer(node="node1", slot=1, when=when)) == "kill-trainer node1 slot=1 @5"
    assert str(Squeeze(node="node1", seconds=3.0, when=when)) == "squeeze node1 room=16 seconds=3 @5"
    assert str(Narrow(node="node1", when=when)) == "narrow node1 megabits=20 for 10 s @5"
    assert str(StoreGone(when=when)) == "store-gone seconds=5 @5"
    assert str(SlowBlocks(rank=2, when=when)) == "slow on rank 2 factor=1.3 @5"


def test_a_word_that_is_none_is_refused_with_the_nearest() -> None:
    """And with where to see all."""
    with pytest.raises(UsageError, match=r"no fault 'kil'; did you mean 'kill'\?; `elastic3d chaos list`"):
        kind_of("kil")


def test_what_a_job_cannot_have_is_skipped_by_name() -> None:
    """And all else is left."""
    kill, companion = Kill(node="node1", when=When(step=3)), KillCompanion(node="node0", when=When(step=3))
    makes, skips = feasible([kill, companion])
    assert makes == (kill,)
    assert [(fault, why) for fault, why in skips] == [(companion, "the job has one slot a node; give --slots 2")]
    assert feasible([kill, companion], slots=2) == ((kill, companion), ())
    cut = Cut(node="node0", when=When(step=3))
    _, skips = feasible([kill, cut], loopback=True)
    assert [(fault, why.rpartition("; ")[2]) for fault, why in skips] == [
        (cut, "--loopback keeps the nodes from being hosts of their own")
    ]


def test_every_need_is_one_of_some_kind() -> None:
    """No word for what nothing needs."""
    assert {need for kind in KINDS.values() for need in kind.ABOUT.needs} == set(Need)
