"""How many samples each step takes: a function of the step's number alone, as a value.

It is a value and not a callable because it goes into the facts of every checkpoint, into the digest by which nodes know
that they run one job, and into the account of the samples, none of which would be possible with a function.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from elastic3d.errors import UsageError

Parts = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Growing:
    """A global batch that changes with the step: `Growing((0, 256), (1000, 512))` is 512 from step 1000 on."""

    parts: Parts
    """Pairs of first step and global batch, in samples; steps grow, and the first is 0."""

    def __repr__(self) -> str:
        """Return the call that makes it."""
        return f"Growing({', '.join(map(str, self.parts))})"

    def __init__(self, *parts: tuple[int, int]) -> None:
        for part in parts:
            if not isinstance(part, tuple | list) or len(part) != 2:
                raise UsageError(
                    f"Growing takes pairs (from step, global batch), and {part!r} is none; "
                    "Growing((0, 256), (1000, 512)) would do"
                )
        object.__setattr__(self, "parts", tuple((step, batch) for step, batch in parts))
        check_parts(self.parts)


def check_parts(parts: Parts) -> None:
    """Refuse parts that do not define a size for every step; UsageError."""
    wrong = [item for part in parts for item in part if not _whole(item)]
    if wrong:
        raise UsageError(f"Growing takes pairs of whole numbers (from step, global batch); {wrong[0]!r} is not one")
    steps = [step for step, _ in parts]
    if not parts or steps[0] != 0 or any(later <= earlier for earlier, later in pairwise(steps)):
        raise UsageError(
            f"Growing needs pairs (from step, global batch) whose steps begin with 0 and rise; they are {steps}, and "
            "Growing((0, 256), (1000, 512)) would do"
        )
    if any(batch < 1 for _, batch in parts):
        raise UsageError(f"global_batch must be 1 or more from every step on; it is {[batch for _, batch in parts]}")


def check_whole(call: str, **given: Any) -> None:
    """Refuse arguments of a call that are no whole numbers, with which states could not be read back; UsageError."""
    for name, value in given.items():
        if not _whole(value):
            raise UsageError(f"{call}: {name}={value!r} is no whole number; give it as an int")


def _whole(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def part_at(parts: Parts, step: int) -> tuple[int, int]:
    """Return the (from step, global batch) that holds for a step."""
    return parts[bisect_right(parts, step, key=lambda part: part[0]) - 1]


def position_at(parts: Parts, step: int) -> int:
    """Return how many samples all steps before `step` take."""
    ends = [*(begin for begin, _ in parts[1:]), step]
    return sum(max(0, min(end, step) - begin) * batch for (begin, batch), end in zip(parts, ends, strict=True))


def step_at(parts: Parts, position: int) -> int:
    """Return the step that takes the sample at `position` of the run."""
    begin, batch, start = max(
        (begin, batch, start) for begin, batch in parts if (start := position_at(parts, begin)) <= position
    )
    return begin + (position - start) // batch
