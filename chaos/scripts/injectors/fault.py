"""One fault of a job: when it happens and on whom, and the mark that says that it has."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from chaos.scripts import SECOND, mark_of
from chaos.scripts.injectors.injector import Injector, Where
from elastic3d.clock import SYSTEM

if TYPE_CHECKING:
    import elastic3d
    from chaos.scripts.injectors.blocks import FaultyBlock

LEADER, NEWCOMER = -1, -2
"""Stand for the rank of the node that leads, and of one that came when steps had been made."""

_AHEAD = 0.1
"""Most seconds by which a slow node may have slept too long and make up for it; a process that was stopped has not."""


@dataclass(slots=True, kw_only=True)
class Fault:
    """What shall happen, and where this trainer is.

    of: the rank, LEADER or NEWCOMER. out: the folder of the mark that says that it has happened. again: it happens in
    each generation. hung: a `HungFiles`' folder. leads, newcomer: whether this rank's node does, or is. first: the step
    with which its generation began. armed: it has not happened yet. lies: what is wrong of a block is so from this pass
    on. owed: seconds by which a slow node has yet to be longer, less than none where it slept too long.
    """

    kind: str
    injector: Injector
    of: int
    step: int
    micro_batch: int
    out: Path
    block: int = 0
    again: bool = False
    hung: Path | None = None
    node: str = ""
    factor: float = 1.0
    slowed: bool = False
    owed: float = 0.0
    rank: int = -1
    world: int = 0
    first: int = -1
    present: int = -1
    forwards: int = 0
    armed: bool = True
    lies: bool = False
    blocks: list[FaultyBlock] = field(default_factory=list)
    newcomer: bool = False
    leads: Callable[[], bool] = lambda: False
    optimizer: torch.optim.Optimizer | None = None
    run: elastic3d.Run | None = None

    present_one: ClassVar[Fault | None] = None
    """The one of the present step, or the one before."""

    def begin(self, rank: int, step: int) -> None:
        """Note that this rank begins a step, after `step` of them."""
        self.rank, self.present, self.forwards = rank, step, 0
        self.first = step if self.first < 0 else self.first
        match self.injector.where:
            case Where.ALL if step == self.step and self.armed:
                self._now()
                self.injector.inject(self)
                self.armed = False
            case Where.ON if not self.slowed:
                self.slowed = self._now() or self._marked()
            case Where.SAMPLES:
                self._now()

    def forward(self) -> None:
        """Note that a forward pass begins; fail in it if it is the one."""
        at, self.forwards = self.forwards, self.forwards + 1
        if self.injector.where is Where.FORWARD and at == self.micro_batch and self._now():
            self.injector.inject(self)

    def load(self) -> None:
        """Note that a sample is read; fail in it if it is the one.

        It is the first one that is read from the fault's step on: data is loaded ahead, and may be there for this step.
        """
        if self.injector.where is Where.DATA and self._due(later=True) and self._mark(mark_of(self.step)):
            self.injector.inject(self)
        elif self.kind == "sluggish" and self.slowed:
            SYSTEM.sleep(self.factor)

    def read(self) -> None:
        """Note that this rank reads a sample of the fault's step; fail in the first one."""
        if self.armed:
            self.armed = False
            if self.rank == self.of:
                self._mark(mark_of(self.step))
            self.injector.inject(self)

    def computed(self, seconds: float) -> None:
        """Note that a block's pass took so long; take as much longer as it shall.

        A sleep of less than a millisecond lasts half as long again, and where processors are few nobody wakes at once.
        Later passes are shorter by that: a node that shall take 1.1 times as long took 1.16 times, and was named.
        """
        if self.kind == "slow" and self.slowed:
            self.owed += (self.factor - 1) * seconds
            if self.owed > 0:
                begun = SYSTEM.monotonic()
                SYSTEM.sleep(self.owed)
                self.owed = max(-_AHEAD, self.owed - (SYSTEM.monotonic() - begun))

    def _marked(self) -> bool:
        """Whether this node is slow since an earlier generation: its trainers have one parent."""
        marked = self._read_mark()
        return marked is not None and int(marked["parent"]) == os.getppid()

    def _read_mark(self) -> dict[str, Any] | None:
        """Return what the mark says, None while there is none, or not all of it."""
        try:
            marked: dict[str, Any] = json.loads((self.out / mark_of(self.step)).read_text())
        except (OSError, ValueError):
            return None
        return marked

    def wrong(self, block: FaultyBlock) -> str:
        """Return what is wrong in this pass of a block, as `Injector.wrong`; to be called in it, after `forward`."""
        injector = self.injector
        if injector.where is not Where.BLOCK or self.block >= len(self.blocks) or block is not self.blocks[self.block]:
            return ""
        if self.forwards - 1 == self.micro_batch and self._now():
            self.lies = injector.sticky
            return injector.wrong
        if injector.second and self.rank == (self.of + 1) % max(1, self.world) and self.present == self.step:
            self.lies |= self._mark(SECOND)
        return injector.wrong if self.lies else ""

    @property
    def bit(self) -> int:
        """The bit that is wrong: two liars have their own."""
        return 12 + self.rank % 8

    def _now(self) -> bool:
        return self._due() and self._mark(mark_of(self.step))

    def _due(self, *, later: bool = False) -> bool:
        if self.of == NEWCOMER:
            # Of the first generation all nodes are; and whoever is let in comes some steps later.
            return self.newcomer and self.present == self.first >= self.step > 0
        come = self.present >= self.step if later else self.present == self.step
        return come and self._mine()

    def _mine(self) -> bool:
        """Whether it happens to this rank."""
        marked = self._read_mark() if self.injector.stays else None
        if marked is not None:
            return bool(marked["node"] == self.node)
        return self.injector.everyone or self.rank == self.of or (self.of == LEADER and self.leads())

    def _mark(self, name: str) -> bool:
        mark = {
            "at": SYSTEM.wall(),
            "kind": self.kind,
            "rank": self.rank,
            "node": self.node,
            "step": self.present,
            "pid": os.getpid(),
            "parent": os.getppid(),
        }
        try:
            with (self.out / name).open("x") as file:
                file.write(json.dumps(mark) + "\n")
        except FileExistsError:
            return self.again
        return True
