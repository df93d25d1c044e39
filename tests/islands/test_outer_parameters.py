"""How a newcomer comes to the outer parameters while others delete what it reads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from checkpointing import open_store
from elastic3d.islands import Islands, member
from elastic3d.islands.exchange import Exchange
from elastic3d.islands.outer_parameters import OuterParameters
from elastic3d.islands.record import SentDelta
from elastic3d.training import run_alone
from tests.islands import mains

LAST = mains.ROUNDS


@pytest.mark.parametrize("all_gone", [True, False])
def test_the_first_base_comes_while_a_newcomer_reads_deltas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_gone: bool
) -> None:
    """It begins from it: whoever deletes deltas has put it there before. Also where some of a step's are left."""
    store, hidden = tmp_path / "between", tmp_path / "hidden"
    exchange = Exchange(open_store(str(store)))
    weights: list[str] = []

    def train(name: str, steps: int) -> None:
        islands = Islands(store=store, every=mains.EVERY, keep=None, longest=10)
        run_alone(lambda run: weights.append(mains.train(run, steps=steps)[0]), islands=islands, name=name, threads=1)

    monkeypatch.setattr(member, "BASES", LAST)
    train("east", steps=LAST * mains.EVERY)
    for folder in ("base", "bases"):
        shutil.move(store / folder, hidden / folder)
    read, steps = OuterParameters.read, []

    def reading(self: OuterParameters, outer: int, sent: SentDelta, into: object) -> int:
        if outer == 2:
            shutil.copytree(hidden, store, dirs_exist_ok=True)
            exchange.forget(LAST, keep=1)
            if not all_gone:
                exchange.store.put(f"deltas/{2:08}/west.1/rest", b"")
        steps.append(outer)
        return read(self, outer, sent, into)  # type: ignore[arg-type]

    monkeypatch.setattr(OuterParameters, "read", reading)
    # The outer step that admits it merges nothing.
    train("west", steps=(LAST + 1) * mains.EVERY)
    assert steps == [1, 2]
    assert weights[0] == weights[1]
