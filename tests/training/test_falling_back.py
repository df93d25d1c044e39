"""Which checkpoint a run resumes from if no state is in memory, and how it treats damaged ones."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from checkpointing import (
    Piece,
    commit,
    mark_distrusted,
    mark_verified,
    mark_vetted,
    open_store,
    read_latest,
    resolve_name,
    save_rank,
)
from checkpointing.format import names
from checkpointing.interchange.tensors import buffer_of
from checkpointing.reading.sources import Offered, TileSource
from checkpointing.retention.policy import Retention, retained
from elastic3d.distrust import Distrust
from elastic3d.errors import StateError
from elastic3d.membership.records import SavedStep
from elastic3d.port import Go, LocalState, NearMemory, StateRestored
from elastic3d.training import Main, Run, restoring
from elastic3d.training.restoring import Decision
from elastic3d.training.standalone import StandalonePort
from elastic3d.training.tiers import KeepersAndStore
from elastic3d.values import Layout, StoreAt
from elastic3d.worker.checkpoints.writing import CheckpointWriter
from elastic3d.worker.options import Saving
from elastic3d.worker.processes.slot import PinnedSnapshot
from tests.parallel.mains import train
from tests.parallel.models import Model, Sentences, loss_fn
from tests.parallel.worlds import Files, Orders, run_world
from tests.training.damage import spoil_tiles


class Keeping(StandalonePort):
    """The port of a run of one rank that commits a checkpoint of every step."""

    def __init__(
        self,
        folder: Path,
        generation: int,
        *,
        restore: str = "latest",
        writer: CheckpointWriter | None = None,
        distrusted: tuple[Distrust, ...] = (),
        audit: float = 0.0,
    ) -> None:
        super().__init__()
        self.store, self.writer = open_store(str(folder)), writer
        self.assignment = replace(
            self.assignment,
            generation=generation,
            store=StoreAt(url=str(folder)),
            snapshot_every=1,
            restore=restore,
            audit=audit,
        )
        self.outcome: dict[str, Any] = {}
        self.distrusted, self.clean = distrusted, list[int | None]()

    def await_go(self) -> Go:
        return Go(servers=(), distrusted=self.distrusted)

    def snapshot(self, state: LocalState, *, checkpoint: bool, wait: bool) -> None:
        made_in, step, facts = self.assignment.generation, state.step, state.facts
        self.clean.append(facts.get("clean"))
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


def test_checkpoints_that_a_rule_refuses_are_passed_over(folder: Path) -> None:
    """The run goes back behind them, says so, and ends with the bits it would have had; no later one goes back again.

    Checkpoints made since have lower steps in a higher generation, and are the newest ones for all that.
    """
    undisturbed = go_through(Keeping(folder.parent / "other", 1), steps=6)
    rules = (Distrust(before=2, step=2),)
    back = Keeping(folder, 2, distrusted=rules)
    go_through(back, steps=3)
    assert (back.outcome["source"], back.outcome["step"], back.outcome["damaged"]) == ("store", 2, ())
    assert "states up to step 4 are passed over, since a device that computes wrongly" in back.outcome["detail"]
    store = open_store(str(folder))
    ref = read_latest(store)
    assert ref is not None
    assert (ref.step, ref.made_in) == (3, 2)
    mark_verified(store, resolve_name(store, "latest"))
    assert retained(ref.committed, Retention(keep_last=1), ()) == (ref.checkpoint,)
    again = Keeping(folder, 3, restore="verified", distrusted=rules)
    assert go_through(again, steps=6) == undisturbed
    assert (again.outcome["step"], again.outcome["detail"]) == (3, "")


def test_a_job_that_knows_of_no_rule_finds_them_in_the_store(folder: Path) -> None:
    """One under another id, or after etcd was lost: it goes on from none of them either, and says what it takes."""
    store = open_store(str(folder))
    mark_distrusted(store, [Distrust(before=2, step=2)])
    other = Keeping(folder, 2)
    go_through(other, steps=3)
    assert (other.outcome["source"], other.outcome["step"]) == ("store", 2)
    assert "states up to step 4 are passed over" in other.outcome["detail"]
    assert "not vetted; none is" in other.outcome["detail"]
    mark_distrusted(store, [Distrust(before=3, step=2)])
    mark_vetted(store, "1")
    named = Keeping(folder, 3, restore="vetted")
    go_through(named, steps=2)
    assert (named.outcome["source"], named.outcome["step"], named.outcome["detail"]) == ("store", 1, "")
    mark_vetted(store, "1")  # the state that the run began with is in the store again
    mark_distrusted(store, [Distrust(before=4, step=1)])
    back = Keeping(folder, 4)
    go_through(back, steps=2)
    assert back.outcome["step"] == 1
    assert "is vetted: every node that made it was audited afterwards" in back.outcome["detail"]


def test_without_a_vetted_checkpoint_the_run_says_why(folder: Path) -> None:
    """It does not take another one instead."""
    with pytest.raises(StateError, match=r"restore='vetted': no checkpoint .* is vetted: no audit has vouched"):
        go_through(Keeping(folder, 2, restore="vetted"))


def test_where_all_checkpoints_are_refused_the_run_begins_again(folder: Path) -> None:
    """There is nothing that a person could choose instead."""
    port = Keeping(folder, 2, distrusted=(Distrust(before=2, step=0),))
    assert go_through(port) == go_through(Keeping(folder.parent / "other", 1))
    assert (port.outcome["source"], port.outcome["step"]) == ("none", 0)
    assert "there is no older state, and from the beginning on all is done again" in port.outcome["detail"]


def test_a_refused_checkpoint_that_is_named_is_the_users_choice(folder: Path) -> None:
    """It is taken, and the run says what is wrong with it; those that descend from it are not."""
    port = Keeping(folder, 2, restore="4", distrusted=(Distrust(before=2, step=2),))
    go_through(port, steps=5)
    assert (port.outcome["source"], port.outcome["step"]) == ("store", 4)
    assert "taken because restore= names it" in port.outcome["detail"]
    after = Keeping(folder, 3, restore="4", distrusted=(Distrust(before=3, step=4),))
    go_through(after, steps=5)
    assert after.outcome["step"] == 4
    assert "states up to step 5 are passed over" in after.outcome["detail"]


def test_what_audits_vouch_for_lives_through_generations(tmp_path: Path) -> None:
    """One that cannot be audited vouches for nothing more; a run without audits says nothing of them."""
    audited, quiet = tmp_path / "audited", tmp_path / "quiet"
    first = Keeping(audited, 1, audit=0.01)
    go_through(first, steps=2)
    second = Keeping(audited, 2, audit=0.01)
    go_through(second, steps=3)
    assert (first.clean, set(second.clean)) == ([0, 0], {0})
    plain = Keeping(quiet, 1)
    go_through(plain, steps=2)
    later = Keeping(quiet, 2, audit=0.01)
    go_through(later, steps=3)
    assert (plain.clean, set(later.clean)) == ([None, None], {2})


class Remembering(Keeping):
    """A port that keeps a snapshot of each step besides, in a folder that stands for the keepers' memory."""

    def __init__(self, folder: Path, generation: int, memory: Path) -> None:
        super().__init__(folder, generation)
        self.memory = memory
        memory.mkdir(exist_ok=True)

    def await_go(self) -> Go:
        made = 4 if self.assignment.generation > 1 else 0
        return Go(servers=(str(self.memory),), newest=made, reached=made)

    def snapshot(self, state: LocalState, *, checkpoint: bool, wait: bool) -> None:
        if state.step <= 2:
            super().snapshot(state, checkpoint=checkpoint, wait=wait)
        content = [(s, b, bytes(buffer_of(tensor.contiguous()))) for s, b, tensor in state.tiles]
        (self.memory / f"{state.step}.{self.assignment.generation}.0").write_bytes(pickle.dumps((state.facts, content)))


class Spoilt(KeepersAndStore):
    """Keepers' memory in a folder, in which some steps have other bytes than they were offered with."""

    def __init__(self, steps: Collection[int]) -> None:
        super().__init__("run")
        self.steps, self.name, self._files = steps, "files", Files()

    def inventories(self, servers: Sequence[str]) -> Any:
        return self._files.inventories(servers)

    def sources(
        self, decision: Decision, at: StoreAt | None, rank: int, near: Sequence[NearMemory] = ()
    ) -> Mapping[str, TileSource]:
        return {self.name: self} if decision.source == "memory" else super().sources(decision, at, rank, near)

    def fetch(self, tile: Offered) -> bytes | memoryview:
        data = bytearray(self._files.fetch(tile))
        if int(Path(tile.where[0]).name.split(".")[0]) in self.steps:
            data[0] ^= 1
        return bytes(data)


def train_and_look(run: Run) -> str:
    """Train as a script that looks at the weights it begins with, so that they are made before a state comes."""
    model = run.shard(Model, blocks="blocks", seed=3)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(), global_batch=14, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=4):
        run.step(optimizer, loss=run.backward(model, batch, loss_fn), clip=0.5)
    return run.digest()


@pytest.mark.gloo
@pytest.mark.parametrize("layout", [Layout(pp=2, dp=1), Layout(pp=1, dp=2)], ids=["pp", "dp"])
@pytest.mark.parametrize("main", [train, train_and_look], ids=["train", "look"])
@pytest.mark.parametrize("lost", ["of one rank", "its first step"])
def test_ranks_that_have_read_a_state_begin_again_with_one_that_finds_damage(
    layout: Layout, main: Main, lost: str, tmp_path: Path
) -> None:
    """From the beginning, or from an older state: what they have read leaves no trace in weights, updates, samples."""
    undisturbed = [report.result for report in run_world(main, Orders(layout=layout, keep=tmp_path, snapshot_every=1))]
    for file in tmp_path.iterdir():
        if int(file.name.split(".")[0]) > 2:
            file.unlink()
    spoilt = {file.name for file in tmp_path.glob("*.1.0" if lost == "of one rank" else "2.1.0")}
    reports = run_world(main, Orders(layout=layout, take=tmp_path, spoilt=frozenset(spoilt)))
    assert [report.error for report in reports] == ["", ""]
    assert {report.restored for report in reports} == {("none", 0, 0) if lost == "of one rank" else ("memory", 1, 1)}
    assert [report.result for report in reports] == undisturbed


@pytest.mark.parametrize(("spoilt", "source", "step"), [((4,), "memory", 3), ((1, 2, 3, 4), "store", 2)])
def test_a_snapshot_without_a_good_copy_costs_the_steps_since_the_one_before(
    tmp_path: Path, spoilt: tuple[int, ...], source: str, step: int
) -> None:
    """It is no error of the script: an older one is taken, or a checkpoint, and the bits are the same."""
    undisturbed = go_through(Keeping(tmp_path / "other", 1), steps=6)
    train(Run(Remembering(tmp_path / "store", 1, tmp_path / "memory"), tiers=Spoilt(())), steps=4)
    port = Remembering(tmp_path / "store", 2, tmp_path / "memory")
    assert train(Run(port, tiers=Spoilt(spoilt)), steps=6) == undisturbed
    assert (port.outcome["source"], port.outcome["step"]) == (source, step)


class Forgetful(KeepersAndStore):
    """A store of which nothing is left once a checkpoint was found damaged, as memory is that is lost for good."""

    def checkpoint(
        self, at: StoreAt, wanted: str, damaged: Sequence[str], distrusted: Sequence[Distrust] = ()
    ) -> restoring.Decision | None:
        return None if damaged else super().checkpoint(at, wanted, damaged, distrusted)


def test_what_was_read_of_a_damaged_state_leaves_no_trace(folder: Path) -> None:
    """A run that begins anew after it has the bits of one that has read nothing, also those of its optimizer."""
    undisturbed = go_through(Keeping(folder.parent / "other", 1), steps=6)
    spoil_tiles(open_store(str(folder)), 4, older=())
    port = Keeping(folder, 2)
    assert train(Run(port, tiers=Forgetful("run")), steps=6) == undisturbed
    assert (port.outcome["source"], port.outcome["step"], len(port.outcome["damaged"])) == ("none", 0, 0)
