"""What faults of a disk have in common: a file system of its own is spoilt for a while."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Self

from chaos.faults.fault import Fault, check_seconds
from chaos.faults.moment import When


@dataclass(frozen=True, slots=True, kw_only=True)
class OfDisk(Fault):
    """Something that lasts for `seconds` on a disk."""

    seconds: float = 5.0

    def check(self) -> None:
        """Refuse a time that is none."""
        Fault.check(self)
        check_seconds(self, self.seconds)

    @classmethod
    def drawn(cls, chance: Random, *, nodes: int, steps: int) -> Self:
        """Return one of some seconds."""
        return cls(when=When(step=chance.randrange(1, steps)), seconds=chance.choice((0.5, 2.0, 5.0)))

    def __str__(self) -> str:
        return f"{self.WORD} for {self.seconds:g} s {self.when}"
