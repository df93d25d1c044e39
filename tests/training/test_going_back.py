"""A loss that jumps up: the run goes back to a state of before, and leaves out the steps that led to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from checkpointing import Piece, commit, mark_distrusted, open_store, save_rank
from checkpointing.interchange.tensors import buffer_of
from elastic3d.data import Order
from elastic3d.data.ledger import check
from elastic3d.distrust import Distrust
from elastic3d.errors import StateError
from elastic3d.port import Audited, AuditReport, Go, LocalState, StateRestored
from elastic3d.rollback import Rollback
from elastic3d.training import Run
from elastic3d.training.standalone import StandalonePort
from elastic3d.training.tiers import KeepersAndStore
from elastic3d.values import StoreAt

BATCH, STEPS, BACK, EVERY = 4, 60, 10, 6
LENGTH = BATCH * 100
HIGH = (45, 46, 47, 48)
"""Steps of bad samples; the third of them shows the spike."""


class WentBack(Exception):
    """The port ended the trainer."""

    def __init__(self, report: AuditReport) -> None:
        super().__init__(report.detail)
        self.report = report


class Keeping(StandalonePort):
    """The port of one rank that commits a checkpoint each few steps, in a generation of a job."""

    def __init__(
        self, folder: Path | None, generation: int, *, go: Go | None = None, acts: bool = True, steps: int = BACK
    ) -> None:
        super().__init__()
        self.store = open_store(str(folder)) if folder is not None else None
        self.assignment = replace(
            self.assignment,
            generation=generation,
            store=StoreAt(url=str(folder)) if folder is not None else None,
            snapshot_every=EVERY,
            spike="rollback",
            rollback_steps=steps,
            audit_acts=acts,
        )
        self.go = go or Go(servers=())
        self.detail, self.source, self.step = "", "", -1
        self.facts: dict[str, Any] = {}

    def await_go(self) -> Go:
        return self.go

    def snapshot(self, state: LocalState, *, checkpoint: bool, wait: bool) -> None:
        self.facts = dict(state.facts)
        if self.store is None or state.step % EVERY:
            return
        made_in, step = self.assignment.generation, state.step
        pieces = [Piece(spec=s, box=b, data=buffer_of(tensor.contiguous())) for s, b, tensor in state.tiles]
        save_rank(self.store, step=step, made_in=made_in, attempt=0, rank=0, world=1, pieces=pieces, facts=state.facts)
        commit(self.store, step=step, made_in=made_in, attempt=0, committed_in=made_in, world=1)

    def restored(self, state: StateRestored) -> None:
        self.detail, self.source, self.step = state.detail, state.source, state.step

    def convicted(self, report: AuditReport) -> NoReturn:
        assert report.kind is Audited.SPIKED
        raise WentBack(report)


def samples(high: Iterable[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a data set in which these steps have targets that are far off."""
    order = Order(length=LENGTH, global_batch=BATCH, micro_batch=2, seed=5)
    bad = {int(one) for step in high for one in order.samples(*order.positions(step))}
    drawn = torch.randn(LENGTH, 6, generator=torch.Generator().manual_seed(1))
    return [(x, torch.full((2,), 90.0) if number in bad else x[:2]) for number, x in enumerate(drawn)]


@dataclass(frozen=True)
class Ending:
    """Where a run ended, with what digest and facts."""

    digest: str
    losses: list[float]
    port: Keeping


def train(
    port: Keeping, *, high: Sequence[int] = HIGH, exclude: Sequence[tuple[int, int]] = (), steps: int = STEPS
) -> Ending:
    """Train a small model; WentBack if the run goes back."""
    run = Run(port, tiers=KeepersAndStore("run"))
    model = run.shard(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)), seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    batches = run.batches(samples(high), global_batch=BATCH, micro_batch=2, seed=5, exclude=exclude)
    run.restore(model=model, optimizer=optimizer, schedule=schedule, batches=batches)
    losses = []
    for batch in batches.until(step=steps):
        loss = run.backward(model, batch, nn.functional.mse_loss)
        run.step(optimizer, schedule, loss=loss, clip=1.0)
        losses.append(loss.value)
    assert check(run.ledger, batches.order, stop_step=steps).whole
    return Ending(run.digest(), losses, port)


def quiet(folder: Path, holes: Sequence[tuple[int, int]], **options: Any) -> str:
    """Return the digest of a run that knows what is left out from its beginning."""
    port = Keeping(folder, 1)
    port.assignment = replace(port.assignment, spike="log")
    return train(port, exclude=holes, **options).digest


def following(report: AuditReport, before: Go | None = None) -> Go:
    """Return what the generation after one that went back is told, as the membership's record says it."""
    assert report.rollback is not None
    known = before or Go(servers=())
    rule = Distrust(before=report.rollback.before, step=report.clean)
    return replace(known, distrusted=(*known.distrusted, rule), rollbacks=(*known.rollbacks, report.rollback))


def goes_back(port: Keeping, **options: Any) -> AuditReport:
    """Train until the run goes back; return what it says."""
    with pytest.raises(WentBack) as ended:
        train(port, **options)
    return ended.value.report


def test_it_ends_with_the_bits_of_a_run_that_knew_the_holes(tmp_path: Path) -> None:
    """Whichever state is gone on from, and however often what follows begins again."""
    report = goes_back(Keeping(tmp_path / "store", 1))
    first = HIGH[2] - BACK + 1
    assert report.rollback == Rollback(
        before=2, step=first, spike=HIGH[2], first=first * BATCH, stop=(HIGH[2] + 1) * BATCH
    )
    assert report.clean == first
    go = following(report)
    middle = Keeping(tmp_path / "store", 2, go=go)
    # It ends again among the steps that are left out, and the next one goes on from there.
    train(middle, steps=first + 7)
    assert (middle.source, middle.step) == ("store", first // EVERY * EVERY)
    assert "the loss jumped up in step 47" in middle.detail
    assert "positions 152 to 191, which are left out" in middle.detail
    last = train(Keeping(tmp_path / "store", 3, go=go))
    assert last.port.step == first + 7 - (first + 7) % EVERY
    hole = (report.rollback.first, report.rollback.stop)
    assert last.digest == quiet(tmp_path / "quiet", [hole])
    assert last.port.facts["order"]["holes"] == [list(hole)]
    # What a state says of it is enough from then on: a job that has lost its records goes on alike.
    assert train(Keeping(tmp_path / "store", 4)).digest == last.digest


def test_a_job_that_has_forgotten_finds_the_same_again(tmp_path: Path) -> None:
    """Nobody wrote it down before all died: the same steps show the same spike, in whatever state they begin."""
    first = goes_back(Keeping(tmp_path / "store", 1))
    again = goes_back(Keeping(tmp_path / "store", 2))
    assert first.rollback is not None
    assert again.rollback == replace(first.rollback, before=3)


def test_a_rule_of_the_store_is_enough(tmp_path: Path) -> None:
    """The job's record is gone, and the store still refuses what led to the spike: the same is left out again.

    Nobody is accused: the rule does not say whether it was a device, and only the job's record did.
    """
    first = goes_back(Keeping(tmp_path / "store", 1))
    mark_distrusted(open_store(str(tmp_path / "store")), [Distrust(before=2, step=first.clean)])
    port = Keeping(tmp_path / "store", 2)
    again = goes_back(port)
    assert (port.source, port.step) == ("store", first.clean // EVERY * EVERY)
    assert "a rule of the store refuses them" in port.detail
    assert "device" not in port.detail.partition("refuses them")[0]
    assert first.rollback is not None
    assert again.rollback == replace(first.rollback, before=3)
    last = train(Keeping(tmp_path / "store", 3, go=following(again)))
    assert last.digest == quiet(tmp_path / "quiet", [(first.rollback.first, first.rollback.stop)])


def test_a_young_run_goes_back_half_of_what_it_has_made(tmp_path: Path) -> None:
    """And begins anew where nothing older is saved; it leaves out as many steps as it makes again."""
    report = goes_back(Keeping(None, 1, steps=100))
    assert report.rollback is not None
    assert (report.rollback.step, report.clean) == (24, 0)
    # What is refused lies in memory or in the store: here, in another generation's store.
    goes_back(Keeping(tmp_path / "store", 1, steps=100))
    port = Keeping(tmp_path / "store", 2, go=following(replace(report, clean=0)))
    last = train(port)
    assert (port.source, port.step) == ("none", -1) or port.step == 0
    assert last.digest == quiet(tmp_path / "quiet", [(report.rollback.first, report.rollback.stop)])


def test_a_job_does_not_go_back_for_ever(tmp_path: Path) -> None:
    """Nothing is passed over where nothing is kept, and the run begins anew: its record counts how often."""
    go = Go(servers=())
    for generation in range(1, 4):
        report = goes_back(Keeping(None, generation, go=go, steps=100))
        go = following(report, go)
    ending = train(Keeping(None, 4, go=go, steps=100))
    assert "went back 3 times" in next(one.why_kept for one in ending.port.records if one.usual is not None)


def test_without_an_older_state_it_is_only_reported() -> None:
    """Going back to the beginning of a run that is not young would cost more than the spike."""
    ending = train(Keeping(None, 1))
    told = [record for record in ending.port.records if record.usual is not None]
    assert [record.step for record in told] == [HIGH[2] + 1]
    assert "no state of at most 38 steps is in memory or in the store" in told[0].why_kept
    assert (ending.port.records[-1].spike, ending.port.records[-1].left_out) == (HIGH[2], 0)


def test_whoever_only_wants_to_be_told_is(tmp_path: Path) -> None:
    """`act="log"` holds for this too, and is said to be why, since the run was asked to go back."""
    ending = train(Keeping(tmp_path / "store", 1, acts=False))
    (told,) = [one.why_kept for one in ending.port.records if one.usual is not None]
    assert told.startswith("only reported: act='log'")


def test_a_run_goes_back_three_times_and_then_only_says_so(tmp_path: Path) -> None:
    """Every spike is answered by what the state says, with holes apart from each other."""
    high = [step for begin in (45, 50, 65, 75) for step in range(begin, begin + 4)]
    go, holes = None, []
    for generation in range(1, 4):
        report = goes_back(Keeping(tmp_path / "store", generation, go=go), high=high, steps=90)
        assert report.rollback is not None
        holes.append((report.rollback.first, report.rollback.stop))
        go = following(report, go)
    # Steps that are left out already do not count as gone back.
    assert [(first // BATCH, stop // BATCH) for first, stop in holes] == [(38, 48), (32, 52), (58, 68)]
    ending = train(Keeping(tmp_path / "store", 4, go=go), high=high, steps=90)
    told = [record for record in ending.port.records if record.usual is not None]
    assert len(told) == 1
    assert "went back 3 times within 10000 steps" in told[0].why_kept
    assert ending.digest == quiet(tmp_path / "quiet", holes, high=high, steps=90)


def test_where_the_older_state_is_gone_nobody_begins_anew(tmp_path: Path) -> None:
    """Far from its beginning, a run whose every older state is gone meanwhile leaves the choice to a person."""
    report = goes_back(Keeping(tmp_path / "store", 1))
    go = following(replace(report, clean=3))
    with pytest.raises(StateError, match="behind the spike of its loss in step 47, and no state older"):
        train(Keeping(tmp_path / "store", 2, go=go))
