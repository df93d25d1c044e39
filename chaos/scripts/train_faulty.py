"""Train the demo's model, and fail once in a chosen way: a rank that stops, spins, hangs or leaves the program.

    train_faulty.py --fault KIND:RANK@STEP[:MB] ...

KIND, in the forward pass of micro-batch MB (0 by default) of the step after STEP steps, on rank RANK:

    stop      SIGSTOP to itself
    gil       native code that holds the interpreter's lock
    lock      a lock that nobody releases
    spin      a loop without end
    loader    the data set does not return
    stall     the data set returns after 20 s
    skip      it leaves out the exchanges of the step's gradients
    order     it calls another collective before the vote
    shape     it votes with a vector of another size

It happens once in the life of the job, whatever generation follows; `<out>/fault.json` says when, where and to whom.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

import elastic3d
from chaos.scripts import MARK, train_gpt
from chaos.scripts.train_gpt import GPT, Block, SourceFiles, cross_entropy, report
from elastic3d.clock import SYSTEM
from elastic3d.parallel.mesh import Mesh
from elastic3d.parallel.reduction.lanes import Lane

LONG = 100_000
STALL = 20.0

Waiting = Callable[[], Tensor]
Begin = Callable[[Mesh, Tensor], Waiting]


@dataclass(slots=True, kw_only=True)
class Fault:
    """What shall happen, and where this trainer is. out: the folder of the mark that says that it has happened."""

    kind: str
    of: int
    step: int
    micro_batch: int
    out: Path
    rank: int = -1
    present: int = -1
    forwards: int = 0

    present_one: ClassVar[Fault | None] = None

    @classmethod
    def parse(cls, text: str, out: Path) -> Fault:
        """Return the fault that KIND:RANK@STEP[:MB] asks for; ValueError where it is not one."""
        match = re.fullmatch(r"([a-z]+):(\d+)@(\d+)(?::(\d+))?", text)
        if match is None or match[1] not in KINDS:
            raise ValueError(f"--fault {text!r}: expected KIND:RANK@STEP[:MB], KIND one of {', '.join(KINDS)}")
        return cls(kind=match[1], of=int(match[2]), step=int(match[3]), micro_batch=int(match[4] or 0), out=out)

    def begin(self, rank: int, step: int) -> None:
        """Note that this rank begins a step, after `step` of them."""
        self.rank, self.present, self.forwards = rank, step, 0

    def forward(self) -> None:
        """Note that a forward pass begins; fail in it if it is the one."""
        at, self.forwards = self.forwards, self.forwards + 1
        if self.kind not in ("loader", "stall") and at == self.micro_batch and self._now():
            KINDS[self.kind]()

    def load(self) -> None:
        """Note that a sample is read; fail in it if it is the one. Data is loaded a step ahead."""
        if self.kind in ("loader", "stall") and self._now():
            KINDS[self.kind]()

    def _now(self) -> bool:
        if self.rank != self.of or self.present != self.step:
            return False
        mark = {"at": SYSTEM.wall(), "kind": self.kind, "rank": self.rank, "step": self.present, "pid": os.getpid()}
        try:
            with (self.out / MARK).open("x") as file:
                file.write(json.dumps(mark) + "\n")
        except FileExistsError:
            return False
        return True


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _hold() -> None:
    # PyDLL keeps the interpreter's lock during the call. A mutex that is locked twice is waited for whatever signals
    # arrive; a sleep would end with the first one.
    native, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(128)
    for _ in range(2):
        native.pthread_mutex_lock(mutex)


def _lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _spin() -> None:
    while True:
        pass


def _skip() -> None:
    whole = Lane.exchange

    def nothing(self: Lane, *given: Any) -> None:
        return None

    _put(Lane, "exchange", nothing)

    def last(mesh: Mesh, votes: Tensor, begin: Begin) -> Waiting:
        wait = begin(mesh, votes)

        def then_mend() -> Tensor:
            _put(Lane, "exchange", whole)
            return wait()

        return then_mend

    _instead_of_vote(last)


def _order() -> None:
    def first(mesh: Mesh, votes: Tensor, begin: Begin) -> Waiting:
        mesh.gather(b"something else")
        return begin(mesh, votes)

    _instead_of_vote(first)


def _shape() -> None:
    def larger(mesh: Mesh, votes: Tensor, begin: Begin) -> Waiting:
        wait = begin(mesh, torch.cat([votes] * 3))
        return lambda: wait()[: votes.numel()]

    _instead_of_vote(larger)


def _put(owner: type, name: str, method: Callable[..., Any]) -> None:
    setattr(owner, name, method)


def _instead_of_vote(other: Callable[[Mesh, Tensor, Begin], Waiting]) -> None:
    """Have `other` called in the place of the next vote only."""
    begin = Mesh.begin_sum

    def once(mesh: Mesh, votes: Tensor) -> Waiting:
        _put(Mesh, "begin_sum", begin)
        return other(mesh, votes, begin)

    _put(Mesh, "begin_sum", once)


KINDS: dict[str, Callable[[], None]] = {
    "stop": _stop,
    "gil": _hold,
    "lock": _lock,
    "spin": _spin,
    "loader": lambda: SYSTEM.sleep(LONG),
    "stall": lambda: SYSTEM.sleep(STALL),
    "skip": _skip,
    "order": _order,
    "shape": _shape,
}


class FaultyBlock(Block):
    """A block that may fail if it is this rank's first; its parameters are those of the demo's."""

    first = False

    def forward(self, x: Tensor) -> Tensor:
        """As the demo's, unless it is time."""
        if self.first and Fault.present_one is not None:
            Fault.present_one.forward()
        return super().forward(x)


class FaultyFiles(SourceFiles):
    """A data set that may fail."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if Fault.present_one is not None:
            Fault.present_one.load()
        return super().__getitem__(index)


def build(options: Any) -> GPT:
    """Return the demo's model, its blocks `FaultyBlock`s."""
    model = GPT(width=options.width, blocks=options.blocks, context=options.context)
    for block in model.blocks:
        block.__class__ = FaultyBlock
    return model


def main(run: elastic3d.Run) -> None:
    """Train; entered once per generation."""
    own, options = arguments()
    fault = Fault.present_one = Fault.parse(own.fault, options.out) if own.fault else None
    model = run.shard(lambda: build(options), blocks="blocks")
    first = next((module for module in model.modules() if isinstance(module, FaultyBlock)), None)
    if first is not None:
        first.first = True
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)
    data = FaultyFiles(options.context)
    batches = run.batches(data, global_batch=options.global_batch, micro_batch=options.micro_batch, seed=options.seed)
    run.restore(model=model, optimizer=optimizer, schedule=schedule, batches=batches)
    for batch in batches.until(step=options.steps):
        if fault is not None:
            fault.begin(run.rank, batch.step)
        loss = run.backward(model, batch, cross_entropy)
        run.step(optimizer, schedule, loss=loss, clip=1.0)
    report(run, options.out)


def arguments() -> tuple[argparse.Namespace, argparse.Namespace]:
    """Return this script's own options, and those of the demo's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", default="", help="KIND:RANK@STEP[:MB]; none by default")
    parser.add_argument("--health", choices=("on", "log", "off"), default="on")
    own, others = parser.parse_known_args()
    return own, train_gpt.arguments(others)


if __name__ == "__main__":
    own, options = arguments()
    elastic3d.run(
        main,
        store=options.store,
        layout=options.layout,
        events=options.events,
        snapshot_every=options.snapshot_every,
        every=options.checkpoint_every,
        health=own.health,
    )
