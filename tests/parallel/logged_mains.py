"""Mains that log numbers of their own, reduce metrics over the ranks, and end their runs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic3d.data import Batches
from elastic3d.errors import UsageError
from elastic3d.training import Run
from tests.parallel.extra_mains import Counted
from tests.parallel.models import Model, Sentences, loss_fn

STEPS = 4


def begun(run: Run, accept: str = "", *, global_batch: int = 14) -> tuple[Any, Any, Batches]:
    model = run.shard(Model, blocks="blocks", seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(), global_batch=global_batch, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches, accept=accept or ())
    return model, optimizer, batches


def log_all_kinds(run: Run) -> tuple[str, list[int]]:
    """Log by every reduction, on some ranks, in some steps; return the digest, and the gathers that each step made."""
    model, optimizer, batches = begun(run)
    gathers: list[int] = []
    gather = dist.all_gather

    def counted(*args: Any, **options: Any) -> Any:
        gathers[-1] += 1
        return gather(*args, **options)

    dist.all_gather = counted
    for batch in batches.until(step=STEPS):
        gathers.append(0)
        loss = run.backward(model, batch, loss_fn)
        run.log(rate=0.1, rank=-1.0)
        run.log(rank=run.rank)  # the last one counts
        run.log(reduce="sum", **{"eval/sum": torch.tensor(run.rank + 0.5)})
        run.log(reduce="max", high=torch.tensor(run.rank, dtype=torch.int64))
        run.log(reduce="last", last=10 * run.rank)
        if run.rank == 1:
            run.log(one=run.steps, odd=math.nan)
        if run.steps == 2 and run.is_first:
            run.log(late=math.inf)
        run.step(optimizer, loss=loss, clip=0.5)
    dist.all_gather = gather
    return run.digest(), gathers


def log_after_the_last(run: Run) -> None:
    """Log after each step, which is refused but for the last one."""
    model = run.shard(Model, blocks="blocks", seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(), global_batch=14, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches, extra={"counted": Counted(seen=0)})
    for batch in batches.until(step=STEPS):
        loss = run.backward(model, batch, loss_fn)
        run.log(rank=run.rank, before=1.0)
        run.step(optimizer, loss=loss, clip=0.5)
        if run.steps < STEPS:
            with pytest.raises(UsageError, match="when no step was being made"):
                run.log(rank=7)
            continue
        run.log(rank=2 + run.rank)
        if run.rank == 1:
            run.log(reduce="max", **{"eval/loss": torch.tensor(0.25)})
    with pytest.raises(UsageError, match="when no step was being made"):
        run.log(rank=7)


def log_nothing(run: Run, *, global_batch: int = 14) -> str:
    """Train as `log_all_kinds` does."""
    model, optimizer, batches = begun(run, global_batch=global_batch)
    for batch in batches.until(step=STEPS):
        run.step(optimizer, loss=run.backward(model, batch, loss_fn), clip=0.5)
    return run.digest()


def log_unlike(run: Run) -> None:
    """Log one name by two reductions on two ranks."""
    model, optimizer, batches = begun(run)
    for batch in batches.until(step=STEPS):
        loss = run.backward(model, batch, loss_fn)
        run.log(reduce="max" if run.is_first else "mean", x=1.0)
        run.step(optimizer, loss=loss)


def stop_on_one(run: Run, *, accept: str = "", steps: int = 9) -> int:
    """Ask on the last rank alone for the end of the run, in step 3; return how many steps there are."""
    model, optimizer, batches = begun(run, accept)
    for batch in batches.until(step=steps):
        loss = run.backward(model, batch, loss_fn)
        if run.rank == run.world - 1 and run.steps == 2:
            run.stop("it is\n good enough")
        run.step(optimizer, loss=loss)
    for _ in batches.until(step=steps):
        raise AssertionError("a run that was stopped has no second phase")
    return run.steps


def reduce_over_ranks(run: Run) -> list[Any]:
    """Reduce numbers and tensors over the ranks."""
    begun(run)
    mine = torch.tensor([run.rank + 0.1, -1.0], device=run.device)
    made: list[Any] = [run.all_reduce(run.rank + 1), run.all_reduce(0.1, "mean"), run.all_reduce(run.rank / 2, "max")]
    made += [run.all_reduce(mine, op) for op in ("sum", "mean", "max", "min")]
    made.append(run.all_reduce(torch.tensor(1 << 60)))
    made.append(run.all_reduce(mine.bfloat16()).dtype)
    try:
        run.all_reduce(torch.ones(1 + run.rank))
    except UsageError as error:
        made.append(str(error))
    return made
