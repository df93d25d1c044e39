"""Orders of faults: which make sense, and which a keeper refuses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from chaos.faults.catalogue import KINDS
from elastic3d.errors import UsageError
from elastic3d.membership.injection import INJECTABLE, FaultAnswer, FaultOrder, ordered, refusal
from elastic3d.membership.records import decode, encode


def test_every_word_is_one_of_the_catalogue() -> None:
    """One word has one meaning, in a schedule and on the command line."""
    assert set(INJECTABLE) <= set(KINDS)


@pytest.mark.parametrize(
    ("word", "slot", "seconds"),
    [("kill", -1, 0.0), ("kill-trainer", 0, 0.0), ("kill-companion", 1, 0.0), ("stop", -1, 5.0), ("pause", 0, 5.0)],
)
def test_what_is_left_out_is_filled_in(word: str, slot: int, seconds: float) -> None:
    """The first slot, or the first that may be meant; five seconds where it lasts."""
    assert ordered(word, by="ann") == FaultOrder(fault=word, slot=slot, seconds=seconds, by="ann")


def test_what_is_given_counts() -> None:
    """Slot and seconds."""
    assert ordered("pause", slot=2, seconds=0.5) == FaultOrder(fault="pause", slot=2, seconds=0.5)


@pytest.mark.parametrize(
    ("word", "given", "message"),
    [
        ("kill-trainor", {}, r"'kill-trainor' can be injected into a live job; did you mean 'kill-trainer'\?; those"),
        ("etcd-restart", {}, "those that can are kill, kill-trainer"),
        ("kill", {"slot": 0}, "kill is of the whole node: leave out --slot"),
        ("kill-trainer", {"seconds": 5.0}, "kill-trainer does not last: leave out --seconds"),
        ("kill-trainer", {"slot": -1}, "slots are counted from 0"),
        ("kill-companion", {"slot": 0}, "1 is the least for it"),
        ("stop", {"seconds": 0.0}, "more than 0 s and at most 3600"),
        ("stop", {"seconds": -1.0}, "more than 0 s"),
        ("pause", {"seconds": math.nan}, "more than 0 s"),
        ("pause", {"seconds": 4000.0}, "at most 3600"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(word: str, given: dict[str, float], message: str) -> None:
    """Before anything is written."""
    with pytest.raises(UsageError, match=message):
        ordered(word, **given)  # type: ignore[arg-type]


def test_an_order_is_read_as_it_was_written() -> None:
    """With its answer or without."""
    order = ordered("kill-trainer", by="ann")
    for one in (order, replace(order, answer=FaultAnswer()), replace(order, answer=FaultAnswer(refused="no"))):
        assert decode(FaultOrder, encode(one), "key") == one


@pytest.mark.parametrize(
    ("order", "lease", "why"),
    [
        (ordered("kill-trainer"), 7, ""),
        (ordered("kill"), 7, ""),
        (ordered("kill-trainer"), 0, "no lease"),
        (ordered("kill-companion"), 7, "no slot 1: the node has 1"),
        (FaultOrder(fault="set-on-fire"), 7, "knows no fault 'set-on-fire'"),
        (FaultOrder(fault="stop", seconds=1e9), 7, "at most 3600"),
        (FaultOrder(fault="kill-trainer", slot=-1), 7, "counted from 0"),
    ],
)
def test_a_keeper_refuses_what_somebody_else_wrote_wrongly(order: FaultOrder, lease: int, why: str) -> None:
    """Whoever may write under the run's prefix may write anything there."""
    said = refusal(order, slots=1, lease=lease)
    assert why in said
    assert bool(said) is bool(why)
