"""Islands beside synchronous training: loss after equal tokens, and what goes between them.

Two islands train the demo's model on the demo's text, each a process started by hand, around a folder. Synchronous
training is one process with the global batch of both together: the same tokens in as many steps. The loss is that of
windows which nobody trains on. What an island puts into the store between them is counted there, all of it; what
synchronous training sends at least is computed: each of a ring of two sends one copy of the gradients in each step.
How fast either is over a slow link, `islands_link` measures.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from chaos.bench.spread import spread
from chaos.scripts.train_gpt import GPT, SourceFiles, cross_entropy
from elastic3d.clock import SYSTEM
from elastic3d.islands import Islands
from elastic3d.islands.exchange import open_exchange
from elastic3d.training import Run, run_alone

NAMES = ("east", "west")
CONTEXT, HELD_OUT = 64, 256
PATIENCE = 3600.0
SYNCHRONOUS = "synchronous"


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandTask:
    """What is trained. options: of `Islands`, besides the store; None for synchronous training. batch: of an island."""

    name: str
    seed: int
    options: dict[str, Any] | None = None
    steps: int = 200
    batch: int = 8
    width: int = 64
    blocks: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandResult:
    """What came of it. loss: of the windows held out, mean of all islands. rate: steps/s.

    bytes: that an island has put into the store between them, mean of all; of synchronous training, one copy of the
    gradients in each step.
    """

    loss: float
    bytes: float
    rate: float
    parameters: int


@dataclass(slots=True)
class IslandFigures:
    """Results by name of the task, one for each seed."""

    results: dict[str, list[IslandResult]] = field(default_factory=dict)

    def table(self) -> Table:
        """Return it for people."""
        made = Table("", "loss", "above synchronous", "sent by an island", "of synchronous", title="after equal tokens")
        base = self.results[SYNCHRONOUS]
        for name, all_ in self.results.items():
            pairs = list(zip(all_, base, strict=True))
            made.add_row(
                name,
                spread([one.loss for one in all_], "", 3),
                spread([one.loss - other.loss for one, other in pairs], "", 3) if all_ is not base else "",
                spread([one.bytes / 1e6 for one in all_], " MB", 2),
                spread([100 * one.bytes / other.bytes for one, other in pairs], " %", 1) if all_ is not base else "",
            )
        return made

    def as_json(self) -> dict[str, Any]:
        """Return it for machines."""
        return {
            name: [{"loss": one.loss, "bytes": one.bytes, "steps_per_second": one.rate} for one in all_]
            for name, all_ in self.results.items()
        }


def per_sample(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of each window."""
    losses = torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
    return losses.view(target.shape).mean(1)


def trained(task: IslandTask, store: str, name: str) -> IslandResult:
    """Train one island, or synchronously, in this process."""
    text = SourceFiles(CONTEXT)
    size = len(text)
    data = torch.utils.data.Subset(text, range(size - HELD_OUT))
    held_out = torch.utils.data.Subset(text, range(size - HELD_OUT, size))
    batch = task.batch if task.options is not None else task.batch * len(NAMES)
    measured: dict[str, Any] = {}

    def main(run: Run) -> None:
        model = run.shard(
            lambda: GPT(width=task.width, blocks=task.blocks, context=CONTEXT), blocks="blocks", seed=task.seed
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=task.steps)
        batches = run.batches(data, global_batch=batch, micro_batch=4, seed=task.seed)
        run.restore(model=model, optimizer=optimizer, schedule=schedule, batches=batches)
        begun = SYSTEM.monotonic()
        for one in batches.until(step=task.steps):
            run.step(optimizer, schedule, loss=run.backward(model, one, cross_entropy), clip=1.0)
        measured["rate"] = task.steps / (SYSTEM.monotonic() - begun)
        measured["loss"] = run.evaluate(model, held_out, per_sample, micro_batch=16)
        measured["parameters"] = sum(parameter.numel() for parameter in model.parameters())

    islands = None
    if task.options is not None:
        islands = Islands(store=store, minimum=len(NAMES), name=name, keep=None, **task.options)
    run_alone(main, threads=1, islands=islands)
    sent = 4 * measured["parameters"] * task.steps
    if islands is not None:
        sent = sum(entry.size for entry in open_exchange(islands).store.entries("")) // len(NAMES)
    return IslandResult(bytes=sent, **measured)


def _island(task: IslandTask, store: str, name: str, sender: Connection) -> None:
    sender.send_bytes(json.dumps(asdict(trained(task, store, name))).encode())


def measured(task: IslandTask) -> IslandResult:
    """Train all islands of a task at the same time, each in a process; return the mean of what they came to."""
    names = NAMES if task.options is not None else NAMES[:1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with tempfile.TemporaryDirectory() as folder, _ended(context, names, task, folder) as receivers:
        said = []
        for receiver in receivers:
            if not receiver.poll(PATIENCE):
                raise SystemExit(f"islands: {task.name} did not end within {PATIENCE:.0f} s")
            said.append(IslandResult(**json.loads(receiver.recv_bytes())))
    return IslandResult(
        loss=sum(one.loss for one in said) / len(said),
        bytes=max(one.bytes for one in said),
        rate=sum(one.rate for one in said) / len(said),
        parameters=said[0].parameters,
    )


@contextlib.contextmanager
def _ended(context: Any, names: tuple[str, ...], task: IslandTask, folder: str) -> Iterator[list[Connection]]:
    ends = [context.Pipe(duplex=False) for _ in names]
    processes = [
        context.Process(target=_island, args=(task, str(Path(folder) / "between"), name, end[1]), daemon=True)
        for name, end in zip(names, ends, strict=True)
    ]
    for process, (_, sender) in zip(processes, ends, strict=True):
        process.start()
        sender.close()
    try:
        yield [receiver for receiver, _ in ends]
    finally:
        for process in processes:
            process.join(timeout=5)
            process.kill()
            process.join()


def tasks(seed: int, steps: int = 200) -> list[IslandTask]:
    """Return what is compared, for one seed."""
    ways: dict[str, dict[str, Any] | None] = {
        SYNCHRONOUS: None,
        "local SGD, H 20": {"every": 20, "outer": "average"},
        "DiLoCo, H 20": {"every": 20},
        "DiLoCo, H 50": {"every": 50},
        "streaming, H 20, 4 fragments": {"every": 20, "fragments": 4},
        "streaming, H 20, 4 fragments, overlap 4": {"every": 20, "fragments": 4, "overlap": 4},
    }
    return [IslandTask(name=name, seed=seed, options=options, steps=steps) for name, options in ways.items()]


def measure(seeds: int, *, first: int = 17, steps: int = 200, say: Any = print) -> IslandFigures:
    """Measure all, for so many seeds."""
    figures = IslandFigures()
    for seed in range(first, first + seeds):
        for task in tasks(seed, steps):
            result = measured(task)
            say(f"{task.name}, seed {seed}: loss {result.loss:.4f}, {result.bytes / 1e6:.2f} MB, {result.rate:.2f}/s")
            figures.results.setdefault(task.name, []).append(result)
    return figures
