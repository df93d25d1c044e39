"""The user's choices about a step's numbers, as passed to `run.shard`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from elastic3d.errors import UsageError
from elastic3d.parallel.numerics.precision import Precision
from elastic3d.parallel.numerics.recompute import Recompute

Choice = TypeVar("Choice", bound=StrEnum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """Choices that are the same on every rank and in every layout."""

    precision: Precision = Precision.FP32
    recompute: Recompute = Recompute.NONE

    @classmethod
    def of(cls, *, precision: str, recompute: str) -> Numerics:
        """Return the choices by their names; UsageError for an unknown name."""
        return cls(
            precision=_choice(Precision, "precision", precision), recompute=_choice(Recompute, "recompute", recompute)
        )


def _choice(kind: type[Choice], argument: str, name: str) -> Choice:
    try:
        return kind(name)
    except ValueError as error:
        names = ", ".join(f'"{one.value}"' for one in kind)
        raise UsageError(f"run.shard: {argument} must be one of {names}; it is {name!r}") from error
