"""Faults that a rank of `scripts/train_faulty.py` brings about itself, at the step and pass that it is asked to."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Self

from chaos.faults.fault import LONGEST, About, Ends, Fault, Need, Place, Replay, values
from chaos.faults.live import LiveJob
from chaos.faults.moment import When
from elastic3d.errors import UsageError

IN_SCRIPT = frozenset({Need.SCRIPT})


def about(
    place: Place,
    enters: str,
    promised: str,
    row: str,
    detector: str = "",
    bar: float = 0.0,
    needs: frozenset[Need] = frozenset(),
    *,
    spreads: bool = False,
    ends: Ends = Ends.GENERATION,
    sure: bool = True,
    says: tuple[str, ...] = (),
) -> About:
    """Return what the catalogue says of a fault within the script: it happens again at the same place."""
    return About(
        place=place,
        enters=enters,
        promised=promised,
        row=row,
        detector=detector,
        bar=bar,
        needs=IN_SCRIPT | needs,
        replay=Replay.EXACT,
        spreads=spreads,
        ends=ends,
        sure=sure,
        says=says,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OfScript(Fault):
    """The script fails after `when.step` steps.

    OPTIONS: of the script, besides the fault; without them nobody looks for it. OF_ALL: it happens to no rank in
    particular, whoever says that it has.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ()
    OF_ALL: ClassVar[bool] = False

    @abstractmethod
    def asked(self) -> str:
        """Return the fault as the script's option `--fault` has it."""

    def arguments(self) -> tuple[str, ...]:
        """Return what the script is asked for."""
        return (f"--fault={self.asked()}", *self.OPTIONS)

    def make(self, job: LiveJob) -> bool:
        """Return whether the script has done it; note it then."""
        node = job.marked(self.when.step)
        if node is not None:
            job.note(self.WORD, "" if self.OF_ALL else node)
        return node is not None

    def check(self) -> None:
        """Refuse other moments than a step."""
        if self.when != When(step=self.when.step):
            raise UsageError(f"{self}: it happens within the script, so that its moment is a step alone")


@dataclass(frozen=True, slots=True, kw_only=True)
class InScript(OfScript):
    """Rank `rank` fails after `when.step` steps, in its pass `micro_batch` of the next one.

    WORD is the script's name of it.
    """

    rank: int = 0
    micro_batch: int = 0

    def asked(self) -> str:
        """Return the fault with its rank, its step and its pass."""
        return f"{self.WORD}:{self.rank}@{self.when.step}:{self.last()}"

    def last(self) -> float:
        """Return the number at the end of what the script is asked for."""
        return self.micro_batch

    def check(self) -> None:
        """Refuse other moments than a step, and numbers below 0."""
        OfScript.check(self)
        if self.rank < 0 or self.micro_batch < 0:
            raise UsageError(f"{self}: ranks and micro-batches are numbered from 0")

    @classmethod
    def drawn(cls, chance: Random, *, nodes: int, steps: int) -> Self:
        """Return one of any rank, once the ranks know their pace."""
        return cls(rank=chance.randrange(nodes), when=When(step=chance.randrange(min(4, steps - 1), steps)))

    def __str__(self) -> str:
        return f"{' '.join((self.WORD, 'on rank', str(self.rank), *values(self, 'rank')))} {self.when}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lasting(InScript):
    """From then on something takes `factor` times as long."""

    factor: float = 1.3

    def last(self) -> float:
        """Return the factor."""
        return self.factor

    def check(self) -> None:
        """Refuse what makes nothing slow, and what never ends."""
        InScript.check(self)
        if not 0 < self.factor <= LONGEST:
            raise UsageError(f"{self}: factor= is above 0, and {LONGEST:g} at most")
