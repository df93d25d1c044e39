"""Which checkpoint a run resumes from if no state is in memory, and how it treats damaged ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from checkpointing import (
    Piece,
    commit,
    mark_verified,
    open_store,
    read_latest,
    resolve_name,
    save_rank,
)
from checkpointing.format import names
from checkpointing.interchange.tensors import buffer_of
from elastic3d.errors import StateError
from elastic3d.membership.records import SavedStep
from elastic3d.port import Go, LocalState, StateRestored
from elastic3d.training import Run
from elastic3d.training.standalone import StandalonePort
from elastic3d.training.tiers import KeepersAndStore
from elastic3d.values import StoreAt
from elastic3d.worker.checkpoints.writing import CheckpointWriter
from elastic3d.worker.options import Saving
from elastic3d.worker.processes.slot import PinnedSnapshot
from tests.parallel.mains import train
from tests.training.damage import spoil_tiles


class Keeping(StandalonePort):
    """The port of a run of one rank that commits a checkpoint of every step."""

    def __init__(
        self, folder: Path, generation: int, *, restore: str = "latest", writer: CheckpointWriter | None = None
    ) -> None:
        super().__init__()
        self.store, self.writer = open_store(str(folder)), writer
        self.assignment = replace(
            self.assignment, generation=generation, store=StoreAt(url=str(folder)), snapshot_every=1, restore=restore
        )
        self.outcome: dict[str, Any] = {}

    def await_go(self) -> Go:
        return Go(servers=())

    def snapshot(self, state: LocalState, *, checkpoint: bool, wait: bool) -> None:
        made_in, step, facts = self.assignment.generation, state.step, state.facts
        pieces = [Piece(spec=s, box=b, data=buffer_of(tensor.contiguous())) for s, b, tensor in state.tiles]
        if self.writer is not None:
            pinned = PinnedSnapshot(generation=made_in, step=step, rank=0, world=1, facts=facts, pieces=pieces)
            self.writer.write(pinned, SavedStep(step=step, made_in=made_in, attempt=0, world=1), False)
        else:
            save_rank(self.store, step=step, made_in=made_in, attempt=0, rank=0, world=1, pieces=pieces, facts=facts)
        commit(self.store, step=step, made_in=made_in, attempt=0, committed_in=made_in, world=1)

    def restored(self, state: StateRestored) -> None:
        self.outcome = {
            "source": state.source,
            "step": state.step,
            "detail": state.detail,
            "damaged": state.damaged,
        }
        if self.writer is not None and state.damaged:
            self.writer.distrust(state.damaged)

    def failed(self, error: BaseException) -> NoReturn:
        raise error


def go_through(port: Keeping, steps: int = 4) -> str:
    """Train up to `steps` on this port; return the digest."""
    return train(Run(port, tiers=KeepersAndStore("run")), steps=steps)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with checkpoints of steps 1 to 4."""
    go_through(Keeping(tmp_path / "store", 1))
    return tmp_path / "store"


def test_damaged_tiles_cost_the_steps_since_the_previous_checkpoint(folder: Path) -> None:
    """The run resumes from the newest whole one, says so, and ends with the bits it would have had."""
    undisturbed = go_through(Keeping(folder.parent / "other", 1), steps=6)
    store = open_store(str(folder))
    newest = resolve_name(store, "4")
    spoil_tiles(store, 4, older=(1, 2, 3))
    port = Keeping(folder, 2, writer=CheckpointWriter(store, Saving(), 1))
    assert go_through(port, steps=6) == undisturbed
    assert (port.outcome["source"], port.outcome["step"], port.outcome["damaged"]) == ("store", 3, (newest,))
    assert "passed over" in port.outcome["detail"]
    # Step 4 was repeated with the same bits, and so the same packs, which were written again.
    again = Keeping(folder, 3, restore="4")
    go_through(again, steps=4)
    assert (again.outcome["step"], again.outcome["damaged"]) == (4, ())
    last = Keeping(folder, 4)
    go_through(last, steps=6)
    assert (last.outcome["step"], last.outcome["damaged"]) == (4, ())


def test_a_checkpoint_with_a_damaged_record_is_skipped(folder: Path) -> None:
    """It cannot even be opened; the one before can."""
    store = open_store(str(folder))
    newest = resolve_name(store, "latest")
    path = folder / names.record(newest)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-3])
    port = Keeping(folder, 2)
    go_through(port)
    assert (port.outcome["step"], port.outcome["damaged"]) == (3, (newest,))


def test_without_a_whole_checkpoint_the_run_does_not_start_over(folder: Path) -> None:
    """All of its work is there and damaged: a person decides."""
    for record in folder.glob("checkpoints/*.record"):
        record.chmod(0o644)
        record.write_bytes(b"")
    with pytest.raises(StateError, match=r"none of its checkpoints is whole"):
        go_through(Keeping(folder, 2))


def test_verified_resumes_from_the_last_verified_checkpoint(folder: Path) -> None:
    """Newer unverified checkpoints are left aside; without a verified one there is nothing to start from."""
    with pytest.raises(StateError, match=r"no checkpoint .* was verified yet"):
        go_through(Keeping(folder, 2, restore="verified"))
    store = open_store(str(folder))
    mark_verified(store, resolve_name(store, "2"))
    port = Keeping(folder, 2, restore="verified")
    go_through(port)
    assert (port.outcome["source"], port.outcome["step"]) == ("store", 2)


def test_a_named_checkpoint_is_only_the_start_of_a_run(folder: Path) -> None:
    """Restarted, the run resumes from its own newest checkpoint, though the script still names the first."""
    first = Keeping(folder, 2, restore="2")
    go_through(first, steps=3)
    assert first.outcome["step"] == 2
    ref = read_latest(open_store(str(folder)))
    assert ref is not None
    assert (ref.step, ref.made_in) == (3, 2)
    second = Keeping(folder, 3, restore="2")
    go_through(second, steps=5)
    assert second.outcome["step"] == 3
    with pytest.raises(StateError, match=r"'nonsense' is no tag, step or committed checkpoint"):
        go_through(Keeping(folder, 4, restore="nonsense"))


def test_a_damaged_named_checkpoint_is_not_replaced_by_another(folder: Path) -> None:
    """Whoever names one means that one."""
    spoil_tiles(open_store(str(folder)), 4, older=(1, 2, 3))
    with pytest.raises(StateError, match=r"asks for this one and no other"):
        go_through(Keeping(folder, 2, restore="4"))
