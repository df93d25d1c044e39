"""One kind of fault of the script, as a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chaos.scripts.injectors.fault import Fault


class Where(StrEnum):
    """Where in a step a fault happens."""

    FORWARD = "forward"  # where a forward pass begins
    BLOCK = "block"  # in a pass of one block, which computes wrongly
    DATA = "data"  # where a sample is read
    ALL = "all"  # where the step begins, on all ranks together
    ON = "on"  # where the step begins, and from then on
    SAMPLE = "sample"  # where any rank reads its first sample of the step
    SAMPLES = "samples"  # in the samples of the step, whoever computes them


def _nothing(fault: Fault) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Injector:
    """A kind of fault. inject: makes it happen; nothing where passes, samples or the data set look at it themselves.

    wrong: of a block, what is wrong: "weight" for a bit of the gradient of a weight, "nan" for all of it, "output" for
    a bit of what it returns, "input" for one of the gradient of its input, "gathered" for one of a weight, "memory" for
    that of its device. sticky: that is so from then on. second: the next rank does the same. again: it happens on each
    try. everyone: on every rank. stays: on the node that it happened to first, whatever its ranks become.
    """

    where: Where = Where.FORWARD
    inject: Callable[[Fault], None] = _nothing
    wrong: str = ""
    sticky: bool = False
    second: bool = False
    again: bool = False
    everyone: bool = False
    stays: bool = False
