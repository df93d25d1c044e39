"""Mains of runs whose state, votes and updates are checked, on some of whose ranks something goes wrong once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from elastic3d.health import recheck
from elastic3d.parallel.numerics import local_step
from elastic3d.parallel.state import local
from elastic3d.training import Run
from elastic3d.training import run as run_module
from tests.parallel.models import Model, Sentences, loss_fn

STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """What goes wrong on a rank in one step.

    what: "rest" for a bit of its state between two updates, "state" for one of the optimizer's, "script" where the
    script writes to its parameters in its passes, "vote" for the factor of its update, "update" for a bit of what its
    update makes, "again" for one of what it computes again for another rank.
    """

    rank: int
    what: str
    step: int = 2


def flip(tensor: torch.Tensor) -> None:
    """Flip a bit as memory does: torch counts no write."""
    local(tensor).data.view(-1)[:1].view(torch.int32)[0] ^= 1 << 12


def train(run: Run, *, wrong: Wrong | None = None, steps: int = STEPS, every: int = 1) -> str:
    """Train the small model with an update checked in one of `every` steps; return the digest."""
    recheck.EVERY = every
    model = run.shard(lambda: Model(), blocks="blocks", seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(), global_batch=16, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=steps):
        faulty = wrong if wrong is not None and wrong.rank == run.rank and wrong.step == batch.step else None
        loss = run.backward(model, batch, _faulty(faulty, model, optimizer))
        _before_step(faulty)
        run.step(optimizer, loss=loss, clip=0.5)
    return run.digest()


def _faulty(wrong: Wrong | None, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return the loss function, which is also where a rank's state changes in its passes."""
    if wrong is None or wrong.what not in ("rest", "state", "script"):
        return loss_fn
    parameter = next(p for p in model.parameters() if local(p).numel())
    done = []

    def once(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if not done:
            done.append(True)
            if wrong.what == "rest":
                flip(parameter)
            elif wrong.what == "state":
                flip(optimizer.state[parameter]["exp_avg_sq"])
            else:
                for one in model.parameters():
                    local(one).data.mul_(0.999)
        return loss_fn(output, target)

    return once


def _before_step(wrong: Wrong | None) -> None:
    """Have this rank's next update, or what it computes again, go wrong."""
    if wrong is None:
        return
    if wrong.what == "vote":
        make = run_module.update

        def other(*given: Any, **named: Any) -> Any:
            run_module.update = make
            change = make(*given, **named)
            return replace(change, factor=change.factor * (1 + 2**-20))

        run_module.update = other
    elif wrong.what == "update":
        step = local_step.step

        def then_flip(optimizer: torch.optim.Optimizer) -> None:
            local_step.step = step
            step(optimizer)
            for state in optimizer.state.values():
                if "exp_avg" in state and local(state["exp_avg"]).numel():
                    flip(state["exp_avg"])

        local_step.step = then_flip
    elif wrong.what == "again":
        compute = recheck.recomputed

        def otherwise(*given: Any) -> dict[str, int]:
            recheck.recomputed = compute
            return {name: value ^ 1 for name, value in compute(*given).items()}

        recheck.recomputed = otherwise
