"""The end of a run is always a checkpoint: what `main` has left goes to the store, however its loop ended."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastic3d.port import LocalState
from elastic3d.training import Run
from elastic3d.training.tiers import KeepersAndStore
from tests.parallel.models import Model, Sentences, loss_fn
from tests.training.test_starting import Host


class Ending(Host):
    """A host that notes which snapshots were taken, and whether they were waited for."""

    def __init__(self, url: Path) -> None:
        super().__init__(str(url), ())
        self.taken: list[tuple[int, bool, bool]] = []

    def snapshot(self, state: LocalState, *, checkpoint: bool, wait: bool) -> None:
        self.taken.append((state.step, checkpoint, wait))


def trained(host: Ending, *, steps: int, stop_at: int = -1) -> Run:
    run = Run(host, tiers=KeepersAndStore(None))
    model = run.shard(Model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = run.batches(Sentences(), global_batch=4, micro_batch=2)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=steps):
        if run.steps == stop_at:
            run.stop("it is good enough")
        run.step(optimizer, loss=run.backward(model, batch, loss_fn))
    return run


@pytest.mark.parametrize(("stop_at", "last"), [(-1, 3), (1, 2)], ids=["until", "stop"])
def test_the_last_state_goes_to_the_store(stop_at: int, last: int, tmp_path: Path) -> None:
    """No checkpoint was due at its step; the keeper is told to wait for that of this one, and of no other."""
    host = Ending(tmp_path)
    run = trained(host, steps=3, stop_at=stop_at)
    assert run.steps == last
    assert not any(checkpoint for _, checkpoint, _ in host.taken)
    assert run.finish() == last
    assert host.taken[-1] == (last, False, True)


def test_a_run_that_made_no_step_has_nothing_to_add(tmp_path: Path) -> None:
    """What it began from is in the store already, or is nothing."""
    host = Ending(tmp_path)
    assert trained(host, steps=0).finish() == -1
    assert not any(wait for _, _, wait in host.taken)
