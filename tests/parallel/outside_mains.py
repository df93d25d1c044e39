"""Mains that call the model themselves, for worlds of real ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elastic3d.devices.cpu import CpuDevice
from elastic3d.parallel import outside
from elastic3d.training import Run
from elastic3d.values import StoreAt
from tests.parallel.models import Model, Sentences, loss_fn


def begun(run: Run) -> tuple[Any, Any, Any]:
    """Return model, optimizer and batches of a run that has restored."""
    model = run.shard(Model, blocks="blocks", seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = run.batches(Sentences(), global_batch=8, micro_batch=2, seed=3)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    return model, optimizer, batches


def evaluate(run: Run, *, alone: bool = False) -> float:
    """Make a step, evaluate on every rank or on rank 0 alone, and make another."""
    outside.PATIENCE = 3.0 if alone else 60.0
    model, optimizer, batches = begun(run)
    seen = 0.0
    for batch in batches.until(step=2):
        loss = run.backward(model, batch, loss_fn)
        run.step(optimizer, loss=loss)
        if not alone or run.rank == 0:
            model.eval()
            with torch.no_grad():
                seen = float(model(Sentences()[0][0].unsqueeze(0)).float().sum())
            model.train()
    return seen


def evaluate_alone(run: Run) -> float:
    """Evaluate under `if run.rank == 0`."""
    return evaluate(run, alone=True)


def evaluate_alone_elsewhere(run: Run) -> float:
    """Evaluate under `if run.rank == 0` with a backend of another name, which lacks gloo's extras."""
    dist.Backend.register_backend("another", another_backend, devices=["cpu"])
    CpuDevice.backend = "another"
    return evaluate(run, alone=True)


def another_backend(store: dist.Store, rank: int, world: int, timeout: timedelta) -> dist.ProcessGroup:
    """Return gloo's process group."""
    return dist.ProcessGroupGloo(store, rank, world, timeout)


class Kept:
    """Something of the script's own that belongs to the state: snapshots are taken when the next batch is asked for."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"seen": 1}


def passed_between(run: Run, *, after: str, training: bool = False, precision: str = "fp32") -> str:
    """Train with a pass of the script's own after the call `after` of each step, none if ""; return the digest.

    training: it is in training mode, with a graph that nobody passes back. The model draws nothing.
    """
    model = run.shard(lambda: Model(dropout=0.0), blocks="blocks", seed=3, precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(), global_batch=8, micro_batch=2, seed=3)
    run.restore(model=model, optimizer=optimizer, batches=batches, extra={"kept": Kept()})

    def look(call: str) -> None:
        if call == after:
            model.train(training)
            with torch.set_grad_enabled(training):
                model(Sentences()[0][0].unsqueeze(0))
            model.train()

    for batch in batches.until(step=3):
        loss = run.backward(model, batch, loss_fn)
        look("backward")
        run.step(optimizer, loss=loss, clip=1e-2)
        look("step")
    return run.digest()


def after_the_loop(run: Run, call: Callable[[Run, Any], Any]) -> None:
    """Make a step, and the call on rank 0 alone when the others are done."""
    model, optimizer, batches = begun(run)
    for batch in batches.until(step=1):
        run.step(optimizer, loss=run.backward(model, batch, loss_fn))
    if run.rank == 0:
        call(run, model)


def evaluate_at_the_end(run: Run) -> None:
    """Evaluate on rank 0 alone when main has returned on the others, or is about to."""
    after_the_loop(run, lambda run, model: model(Sentences()[0][0].unsqueeze(0)))


def digest_at_the_end(run: Run) -> None:
    """Ask for the digest on rank 0 alone."""
    after_the_loop(run, lambda run, model: run.digest())


def gather_at_the_end(run: Run) -> None:
    """Gather a parameter on rank 0 alone, like a script that saves a whole state dict."""
    after_the_loop(run, lambda run, model: [p.full_tensor() for p in model.parameters()])


def leave_early(run: Run) -> None:
    """Leave the loop on the last rank alone, as a script does that asks the clock."""
    model, optimizer, batches = begun(run)
    for batch in batches.until(step=4):
        if run.steps == 2 and run.rank == run.world - 1:
            break
        run.step(optimizer, loss=run.backward(model, batch, loss_fn))


def save_once(run: Run) -> None:
    """Request a checkpoint of the second of three steps, on the last rank alone."""
    run._assignment = replace(run._assignment, store=StoreAt(url="/nowhere"))
    model, optimizer, batches = begun(run)
    for batch in batches.until(step=3):
        loss = run.backward(model, batch, loss_fn)
        if run.steps == 1 and run.rank == run.world - 1:
            run.save()
        run.step(optimizer, loss=loss)


def read_early(run: Run) -> list[tuple[float | None, float]]:
    """Return each step's loss as it reads before `run.step`, None for NaN, and after it."""
    model, optimizer, batches = begun(run)
    read = []
    for batch in batches.until(step=3):
        loss = run.backward(model, batch, loss_fn)
        early = loss.item()
        if run.rank == 0:
            print(f"step {batch.step}: {loss:.3f}")  # as people write it: on one rank alone
        run.step(optimizer, loss=loss)
        read.append((None if math.isnan(early) else early, loss.item()))
    return read
