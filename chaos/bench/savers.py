"""One rank that saves and loads: `python -m chaos.bench.savers CONTENDER JOB`, JOB being one `Job` as JSON.

Rank 0 prints `Figures` as JSON.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from chaos.bench.contenders import Contender, Ours, beside, blind, contender
from chaos.bench.shards import COLUMNS, STATES, Job, State

FROZEN = 10
"""One tensor in so many changes in the task `frozen`."""


@dataclass(slots=True, kw_only=True)
class Figures:
    """What came of it: seconds of each repeat, the slowest rank's; bytes of one rank's shard and of all.

    call, hold: of an asynchronous save, until it returns and what the next optimizer step waits for. memory: the peak
    beyond what was there before, as a multiple of the shard. written: bytes that the last save added.
    blind: saves that did not look at the bytes, in turns with those that did.
    """

    shard: int
    total: int
    save: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    call: list[float] = field(default_factory=list)
    hold: list[float] = field(default_factory=list)
    blind: list[float] = field(default_factory=list)
    memory_save: float = 0.0
    memory_load: float = 0.0
    written: int = 0
    changed: int = 0


def main(name: str, job: Job) -> Figures:
    """Do the job as one rank, and return what all ranks saw."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{job.meeting}", rank=job.rank, world_size=job.world, timeout=timedelta(minutes=10)
    )
    state = State(job)
    total = job.tensors * len(STATES) * job.rows * COLUMNS * 4
    figures = Figures(shard=state.nbytes, total=total)
    match job.task:
        case "save":
            _save(contender(name, state), state, figures)
        case "load":
            saver = contender(name, state)
            for _ in range(job.repeats):
                state.clear()
                figures.load.append(_timed(lambda: saver.load(job.repeats)))
            state.check()
        case "beside":
            other = beside(name, state)
            _beside(other, job, figures)
            if hasattr(other, "close"):
                other.close()
        case "frozen":
            figures = _frozen(contender(name, state), state, figures)
        case "integrity":
            _integrity(Ours(state), state, figures)
        case _:
            raise ValueError(job.task)
    dist.barrier()
    dist.destroy_process_group()
    return figures


def _save(saver: Contender, state: State, figures: Figures) -> None:
    repeats = state.job.repeats
    memory = [0.0, 0.0]
    for step in range(1, repeats + 1):
        state.change()
        memory[0] = max(memory[0], _peak(partial(_save_one, saver, step, figures)))
    for _ in range(repeats):
        state.clear()
        memory[1] = max(memory[1], _peak(lambda: figures.load.append(_timed(lambda: saver.load(repeats)))))
    state.check()
    figures.memory_save, figures.memory_load = (_largest(value / state.nbytes) for value in memory)


def _save_one(saver: Contender, step: int, figures: Figures) -> None:
    figures.save.append(_timed(partial(saver.save, step)))


def _integrity(saver: Ours, state: State, figures: Figures) -> None:
    for step in range(1, 2 * state.job.repeats + 1):
        state.change()
        if step % 2:
            _save_one(saver, step, figures)
        else:
            with blind(step):
                figures.blind.append(_timed(partial(saver.save, step)))


def _beside(saver: Any, job: Job, figures: Figures) -> None:
    a = torch.randn(256, 256)
    for step in range(1, job.repeats + 1):
        dist.barrier()
        begun = time.perf_counter()
        wait = saver.begin(step)
        call = time.perf_counter() - begun
        # The next forward and backward.
        while time.perf_counter() - begun - call < job.step_seconds:
            a = torch.tanh(a @ a)
        begun = time.perf_counter()
        if hasattr(saver, "hold"):
            saver.hold()
        hold = time.perf_counter() - begun
        wait()
        figures.call.append(_largest(call))
        figures.hold.append(_largest(hold))


def _frozen(saver: Contender, state: State, figures: Figures) -> Figures:
    saver.save(1)
    dist.barrier()
    before = _stored(state.job)
    if isinstance(saver, Ours):
        saver.remember()
    changed = state.touch(FROZEN)
    saver.save(2)
    dist.barrier()
    return Figures(
        shard=figures.shard, total=figures.total, written=_stored(state.job) - before, changed=int(_sum(changed))
    )


def _stored(job: Job) -> int:
    return sum(path.stat().st_size for path in Path(job.place).rglob("*") if path.is_file())


def _timed(do: Callable[[], None]) -> float:
    """Return the seconds from a barrier until all ranks have done it."""
    dist.barrier()
    begun = time.perf_counter()
    do()
    dist.barrier()
    return _largest(time.perf_counter() - begun)


def _peak(do: Callable[[], None]) -> float:
    """Return by how many bytes the resident memory of this process was larger, at its peak, than before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    do()
    return _resident("VmHWM") - before


def _resident(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return float(line.split()[1]) * 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024


def _largest(value: float) -> float:
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def _sum(value: float) -> float:
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor)
    return float(tensor)


if __name__ == "__main__":
    said = main(sys.argv[1], Job(**json.loads(sys.argv[2])))
    if json.loads(sys.argv[2])["rank"] == 0:
        print(json.dumps(asdict(said)))
