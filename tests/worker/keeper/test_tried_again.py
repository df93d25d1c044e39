"""A generation that is formed since code raised does not go on from the state right after what raised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from elastic3d.membership.policy import Policy
from elastic3d.port import Go, StateRestored
from elastic3d.rendezvous.settings import Settings
from elastic3d.values import Cause, Generation, Node
from elastic3d.values import Slot as Place
from elastic3d.worker.journal import Journal
from elastic3d.worker.keeper.generations import Generations
from elastic3d.worker.options import RunOptions
from elastic3d.worker.processes import events as w
from elastic3d.worker.processes.slot import SlotPort
from elastic3d.worker.pulse import Figures


class Slot:
    """A slot that keeps what its trainers were let go with."""

    index = tile_port = 0
    lender = ""

    def __init__(self) -> None:
        self.gone: list[Go] = []

    def set_generation(self, number: int) -> None:
        """Take no note of it."""

    def sealed(self, generation: int, ranks: Sequence[str]) -> None:
        """Take no note of it."""

    def set_buddy(self, address: str | None) -> None:
        """Take no note of it."""

    def stop_all(self) -> None:
        """Take no note of it."""

    def prepare(self, assignment: Any) -> int:
        return 1

    def go(self, trainer: int, go: Go) -> None:
        self.gone.append(go)


class Job:
    """A node's part in one generation after another."""

    def __init__(self) -> None:
        self.slot, self.number = Slot(), 0
        self.node = Node(name="n0", incarnation="1", address="host", slots=(Place(tile_port=1),))
        self.generations = Generations(
            Settings(endpoints="", run_id="run", mode="resident", node="n0", address="127.0.0.1", policy=Policy()),
            RunOptions(),
            [cast(SlotPort, self.slot)],
            lambda event: None,
            journal=Journal(None, "run", "n0"),
            figures=Figures(),
        )

    def goes(self, cause: Cause, tried_at: int = 0, *, begins_at: int | None = None) -> tuple[int, str]:
        """Let a generation go; return what its trainers are told of an error. begins_at: None if it has no state."""
        self.number += 1
        detail = f"error {self.number}" if cause.of_script else ""
        generation = Generation(number=self.number, cause=cause, nodes=(self.node,), tried_at=tried_at, detail=detail)
        self.generations.prepare(generation, self.node)
        self.generations.go(generation, self.node)
        if begins_at is not None:
            state = StateRestored(source="none", step=begins_at, generation=0)
            self.generations.heard(w.Restored(slot=0, trainer=1, state=state))
        told = self.slot.gone[-1]
        return told.failed_after, told.failure


def test_what_raised_after_steps_is_passed_over() -> None:
    """Not if it raised before the first one: nothing would be skipped."""
    job = Job()
    assert job.goes(Cause.START, begins_at=0) == (-1, "")
    assert job.goes(Cause.ERROR, 7, begins_at=6) == (7, "error 2")
    assert job.goes(Cause.ERROR, 6, begins_at=6) == (-1, "")
    assert job.goes(Cause.DEATH, 9, begins_at=8) == (-1, "")


@pytest.mark.parametrize("cause", [Cause.ERROR, Cause.OUT_OF_MEMORY])
def test_who_failed_before_it_had_a_state_says_nothing_of_states(cause: Cause) -> None:
    """The store was away, memory ran out: an import of step 0, and what an earlier generation made, are as good."""
    job = Job()
    job.goes(Cause.START)
    assert job.goes(cause, 0) == (-1, "")
    assert job.goes(cause, 0, begins_at=0) == (-1, "")
    assert job.goes(Cause.DEATH, 20) == (-1, "")
    assert job.goes(cause, 20, begins_at=20) == (-1, "")


@pytest.mark.parametrize("cause", [Cause.ERROR, Cause.DEATH])
def test_what_raised_is_passed_over_until_a_generation_has_its_state(cause: Cause) -> None:
    """The next one may fail before that, by an error of another kind or a death."""
    job = Job()
    job.goes(Cause.START, begins_at=0)
    assert job.goes(Cause.ERROR, 40) == (40, "error 2")
    assert job.goes(cause, 40) == (40, "error 2")
    assert job.goes(cause, 40, begins_at=38) == (40, "error 2")
    assert job.goes(Cause.DEATH, 41) == (-1, "")


@pytest.mark.parametrize("how", ["cut off", "a spare"])
def test_who_was_away_meanwhile_takes_the_others_word(how: str) -> None:
    """It never had the state of its last generation, and the others have made steps since."""
    job = Job()
    job.goes(Cause.START, begins_at=0)
    job.goes(Cause.ERROR, 40)
    if how == "cut off":
        job.generations.forget()
    else:
        other = replace(job.node, name="n1")
        job.generations.sealed(Generation(number=3, cause=Cause.DEATH, nodes=(other,)), job.node)
    assert job.goes(Cause.ERROR, 300) == (300, "error 3")


def test_trainers_that_ended_before_they_could_go_are_let_go_nowhere() -> None:
    """Their end has been told, and another generation follows."""
    job = Job()
    generation = Generation(number=1, cause=Cause.START, nodes=(job.node,))
    job.generations.prepare(generation, job.node)
    job.generations.heard(w.TrainerExited(slot=0, trainer=1, kind=w.ExitKind.CRASH, step=-1, code=-9))
    assert not job.generations.go(generation, job.node)
    assert job.slot.gone == []


def test_a_newcomer_takes_the_others_word() -> None:
    """It was not there, and the ranks go by the least of what they say."""
    assert Job().goes(Cause.ERROR, 7) == (7, "error 1")
    assert Job().goes(Cause.ERROR, 0) == (-1, "")
