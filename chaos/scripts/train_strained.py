"""Train the demo's model while it meets what looks like a fault of a rank, and is none.

    train_strained.py --strain KIND:RANK@STEP --strain ...

KIND, on rank RANK in the step after STEP steps, none of which health may take for a fault:

    compile   35 s of computing in the forward pass, as a first step has that compiles
    gc        6 s of garbage collection in the forward pass, of cycles made for it
    stall     the data set returns after 20 s
    stop      SIGSTOP in the forward pass, and SIGCONT 2 s later
    gil       native code holds the interpreter's lock for 2 s
    eval      12 s between two steps, within `run.pause`

`--uneven` gives every eighth sample 16 times the length of the others, for micro-batches of one sample. `--pace` is
slept between any two steps, as a script does that looks at something.
`<out>/fault-STEP.json` is there once a strain is over.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import elastic3d
from chaos.scripts import mark_of, train_gpt
from chaos.scripts.train_gpt import GPT, SourceFiles, cross_entropy, report
from elastic3d.clock import SYSTEM

COMPILE, STORM, STALL, SHORT, EVAL = 35.0, 6.0, 20.0, 2.0, 12.0
"""Seconds of each."""

LONGER, ONE_IN = 16, 8


def _compute() -> None:
    a = torch.ones(64, 64)
    until = SYSTEM.monotonic() + COMPILE
    while SYSTEM.monotonic() < until:
        torch.mm(a, a)


def _collect() -> None:
    until = SYSTEM.monotonic() + STORM
    while SYSTEM.monotonic() < until:
        for _ in range(20_000):
            cycle: list[Any] = []
            cycle.append(cycle)
        gc.collect()


def _stop() -> None:
    # Somebody else has to wake it, and must not wait for it to be reaped.
    command = ["/bin/sh", "-c", f"sleep {SHORT}; kill -CONT {os.getpid()}"]
    waker = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    os.kill(os.getpid(), signal.SIGSTOP)
    waker.wait()


def _hold() -> None:
    ctypes.PyDLL(None).usleep(int(1e6 * SHORT))


FORWARD: Mapping[str, Callable[[], None]] = {"compile": _compute, "gc": _collect, "stop": _stop, "gil": _hold}
KINDS = (*FORWARD, "stall", "eval")


@dataclass(frozen=True, slots=True, kw_only=True)
class Strain:
    """What happens on which rank, in the step after how many steps."""

    kind: str
    rank: int
    step: int

    @classmethod
    def parse(cls, text: str) -> Strain:
        """Return the strain that KIND:RANK@STEP asks for; ValueError where it is not one."""
        match = re.fullmatch(r"([a-z]+):(\d+)@(\d+)", text)
        if match is None or match[1] not in KINDS:
            raise ValueError(f"--strain {text!r}: expected KIND:RANK@STEP, KIND one of {', '.join(KINDS)}")
        return cls(kind=match[1], rank=int(match[2]), step=int(match[3]))


@dataclass(slots=True, kw_only=True)
class Strains:
    """Those of this trainer. out: where to say that one is over. present: the one of the present step, if any; a stall
    stays until it is met, for the step's samples may have been read before it began.
    """

    given: Mapping[int, Strain]
    out: Path
    present: Strain | None = None
    done: set[int] = field(default_factory=set)

    def begin(self, rank: int, step: int) -> None:
        """Note that this rank begins a step, after `step` of them."""
        strain, before = self.given.get(step), self.present
        if strain is not None and strain.rank == rank:
            self.present = strain
        elif before is None or before.kind != "stall" or before.step in self.done:
            self.present = None

    def meet(self, kinds: Mapping[str, Callable[[], None]]) -> None:
        """Go through the present step's strain, once, if it is one of `kinds`."""
        strain = self.present
        if strain is None or strain.kind not in kinds or strain.step in self.done:
            return
        self.done.add(strain.step)
        kinds[strain.kind]()
        (self.out / mark_of(strain.step)).write_text(f'{{"kind": "{strain.kind}"}}\n')


class StrainedFiles(SourceFiles):
    """A data set that stalls when it is time, and whose samples may differ in length."""

    def __init__(self, context: int, *, uneven: bool) -> None:
        super().__init__(context)
        self.uneven = uneven
        self.strains: Strains | None = None

    def __len__(self) -> int:
        return super().__len__() - (LONGER if self.uneven else 0)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.strains is not None:
            self.strains.meet({"stall": lambda: SYSTEM.sleep(STALL)})
        length = self.context * (LONGER if self.uneven and index % ONE_IN == 0 else 1)
        window = self.text[index * self.context : index * self.context + length + 1].long()
        return window[:-1], window[1:]


def main(run: elastic3d.Run) -> None:
    """Train; entered once per generation."""
    own, options = arguments()
    given = [Strain.parse(text) for text in own.strain]
    strains = Strains(given={strain.step: strain for strain in given}, out=options.out)
    longest = options.context * (LONGER if own.uneven else 1)
    model = run.shard(lambda: GPT(width=options.width, blocks=options.blocks, context=longest), blocks="blocks")
    _watch(model, strains)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)
    data = StrainedFiles(options.context, uneven=own.uneven)
    data.strains = strains
    batches = run.batches(data, global_batch=options.global_batch, micro_batch=options.micro_batch, seed=options.seed)
    run.restore(model=model, optimizer=optimizer, schedule=schedule, batches=batches)
    for batch in batches.until(step=options.steps):
        strains.begin(run.rank, batch.step)
        if strains.present is not None and strains.present.kind == "eval":
            with run.pause("eval", "5m"):
                strains.meet({"eval": lambda: SYSTEM.sleep(EVAL)})
        loss = run.backward(model, batch, cross_entropy)
        run.step(optimizer, schedule, loss=loss, clip=1.0)
        SYSTEM.sleep(own.pace)
    report(run, options.out)


def _watch(model: nn.Module, strains: Strains) -> None:
    block = next((module for module in model.modules() if isinstance(module, train_gpt.Block)), None)
    if block is not None:
        block.register_forward_pre_hook(lambda *_: strains.meet(FORWARD))


def arguments() -> tuple[argparse.Namespace, argparse.Namespace]:
    """Return this script's own options, and those of the demo's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strain", action="append", default=[], help="KIND:RANK@STEP; none by default")
    parser.add_argument("--uneven", action="store_true", help="samples of unequal length")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds between two steps")
    own, others = parser.parse_known_args()
    return own, train_gpt.arguments(others)


if __name__ == "__main__":
    _, options = arguments()
    train_gpt.start(main, options)
