"""When a checkpoint is due goes on over generations: churn must not keep a run from saving."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic3d.port import Flags
from elastic3d.training import Run
from elastic3d.training.checkpoint_timer import NOTHING_UNSAVED, CheckpointTimer, Unsaved
from elastic3d.training.standalone import StandalonePort
from elastic3d.values import Layout
from tests.clocks import HandClock
from tests.parallel.models import Model, Sentences, loss_fn
from tests.parallel.worlds import Ended, Files, Host, Orders

HALF_AN_HOUR = 1800.0


class Lives:
    """A run of one rank whose generations each make a few steps of so many seconds and are lost then."""

    def __init__(self, folder: Path, *, every: int = 0, seconds: float = 0.0) -> None:
        self.folder, self.every, self.seconds = folder, every, seconds
        self.clock = HandClock()
        self.ready = True
        self.checkpoints: list[int] = []
        self.steps = 0

    def live(self, steps: int, *, each: float = 1.0, save_at: int | None = None) -> None:
        """Make so many steps more, and lose the generation. save_at: the step before which the script asks to save."""
        lives = self
        take = self.folder / str(self.steps)
        keep = self.folder / str(self.steps + steps)
        keep.mkdir(parents=True)

        class Port(Host):
            def flags(self) -> Flags:
                return Flags(leave=len(self.records) == steps - 1, etcd_away=False, ready=lives.ready)

        orders = Orders(layout=Layout(pp=1, dp=1), keep=keep, take=take if self.steps else None, snapshot_every=1)
        port = Port(orders, 0, ("", 0), "")
        port.assignment = replace(port.assignment, checkpoint_every=self.every, checkpoint_seconds=self.seconds)
        run = Run(port, tiers=Files(), clock=self.clock)
        with pytest.raises(Ended, match="left"):
            self._train(run, each, save_at)
        self.checkpoints += [step for step, checkpoint, _ in port.report.snapshots if checkpoint]
        self.steps += steps

    def _train(self, run: Run, each: float, save_at: int | None) -> None:
        model = run.shard(Model)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
        batches = run.batches(Sentences(), global_batch=4, micro_batch=2)
        run.restore(model=model, optimizer=optimizer, batches=batches)
        for batch in batches.until(step=10_000):
            self.clock.now += each
            if batches.step == save_at:
                run.save()
            run.step(optimizer, loss=run.backward(model, batch, loss_fn))


def test_minutes_are_counted_over_generations_that_each_last_less(tmp_path: Path) -> None:
    """A job that loses a node every ten minutes saves every half an hour nevertheless."""
    lives = Lives(tmp_path, seconds=HALF_AN_HOUR)
    for _ in range(7):
        lives.live(3, each=200.0)
    assert lives.checkpoints == [9, 18]


def test_a_save_that_waits_for_the_store_is_made_by_the_next_generation(tmp_path: Path) -> None:
    """`run.save()` is not forgotten with the generation in which the store was busy; it is made once."""
    lives = Lives(tmp_path)
    lives.ready = False
    lives.live(4, save_at=1)
    assert lives.checkpoints == []
    lives.ready = True
    lives.live(3)
    assert lives.checkpoints == [5]


def test_a_checkpoint_by_steps_that_waits_for_the_store_is_not_passed_over(tmp_path: Path) -> None:
    """Step 10 was due and not taken: the next generation makes up for it, and counts on from there."""
    lives = Lives(tmp_path, every=10)
    lives.ready = False
    lives.live(12)
    lives.ready = True
    lives.live(10)
    assert lives.checkpoints == [13, 20]


def test_a_count_begins_anew_with_a_checkpoint() -> None:
    """What is handed on after one is nothing, and without minutes no seconds are."""
    clock = HandClock()
    assignment = replace(StandalonePort().assignment, checkpoint_seconds=60.0)
    timer = CheckpointTimer(assignment, clock)
    timer.begin(5, Unsaved(seconds=50.0))
    clock.now += 11.0
    assert timer.due(6)
    timer.voted(6, begins=False, unsaved=Unsaved(due=True, seconds=timer.seconds))
    assert timer.unsaved == Unsaved(due=True, seconds=61.0)
    timer.voted(7, begins=True, unsaved=Unsaved(due=True, seconds=61.0))
    assert timer.unsaved == NOTHING_UNSAVED
    assert not timer.due(8)
    by_steps = CheckpointTimer(replace(assignment, checkpoint_seconds=0.0), clock)
    clock.now += 100.0
    assert by_steps.seconds == 0.0
