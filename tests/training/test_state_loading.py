"""How a state is read by a rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from checkpointing.errors import MissingTile
from elastic3d.errors import StateError, StateUnfit
from elastic3d.training import loading
from elastic3d.training.restoring import Decision
from elastic3d.training.state_loading import READS, StateLoader


class Reads:
    """Reads of a state of which some fail; how often it was tried, and what was opened and closed for it."""

    def __init__(self, *failures: MissingTile) -> None:
        self.failures = list(failures)
        self.tries = self.opened = self.closed = 0

    def __call__(self, *_: object, **__: object) -> None:
        self.tries += 1
        if self.failures:
            raise self.failures.pop(0)

    def open_sources(self) -> dict[str, Any]:
        self.opened += 1
        return {"peer": self}

    def close(self) -> None:
        self.closed += 1


def read(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as a rank does; of the rank itself only what is passed on."""
    monkeypatch.setattr(loading, "read", reads)
    mesh = SimpleNamespace(computes_on=None, progress=SimpleNamespace(tick=None))
    names = ("optimizer", "schedule", "batches", "extras", "accept")
    rank = SimpleNamespace(assembly=SimpleNamespace(model=None, mesh=mesh), **dict.fromkeys(names))
    StateLoader._read(cast(StateLoader, rank), cast(Decision, None), reads.open_sources)


def test_copies_that_cannot_be_reached_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By new connections: a link that loses packets for a while makes nobody's script raise."""
    reads = Reads(*[MissingTile("timed out")] * (READS - 1))
    read(reads, monkeypatch)
    assert (reads.tries, reads.opened, reads.closed) == (READS, READS, READS)


def test_copies_that_stay_away_or_are_damaged_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged ones at once, since all ranks go back to another state then."""
    away, damaged = Reads(*[MissingTile("timed out")] * READS), Reads(MissingTile("no good copy", damaged=True))
    for reads, tries in ((away, READS), (damaged, 1)):
        with pytest.raises(MissingTile):
            read(reads, monkeypatch)
        assert (reads.tries, reads.closed) == (tries, tries)


@pytest.mark.parametrize("error", [StateError("step 6 is lost"), StateUnfit("another model")], ids=repr)
def test_where_nothing_can_be_decided_all_ranks_raise(error: StateError) -> None:
    """The same error as rank 0: if it raised alone, its node would be put out for it."""
    sent: list[bytes] = []

    def broadcast(data: bytes | None) -> bytes:
        sent.extend([] if data is None else [data])
        return sent[0]

    rank = cast(StateLoader, SimpleNamespace(assembly=SimpleNamespace(mesh=SimpleNamespace(broadcast=broadcast))))
    for decided in (error, None):
        with pytest.raises(type(error)) as raised:
            StateLoader._shared(rank, decided)
        assert (type(raised.value), str(raised.value)) == (type(error), str(error))
    sent.clear()
    assert [StateLoader._shared(rank, decided) for decided in (b"\1a decision", None)] == [b"\1a decision"] * 2
