"""What became of a trial: what was said of it, and whether that is what ought to be said."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from chaos.score.kinds import KINDS, Culprit
from chaos.score.trials import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A verdict that was told, in a generation. after: seconds since the fault. step: after which, -1 if unknown.

    samples: positions that are left out for it.
    """

    fault: str
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    act: bool
    after: float
    detail: str
    step: int = -1
    generation: int = 1
    samples: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a trial. node: the one at fault. happened: whether the fault took place.

    recovered: seconds from the fault to the first step after its verdict, NaN if there was none. steps_lost: those made
    again. broken: promises of the oracle that were not kept, with those about bits. liar: the second node at fault.
    skipped: what this machine lacks for the trial, which was not played then and proves nothing, "" if it was.
    """

    trial: Trial
    node: str
    happened: bool
    said: tuple[Said, ...]
    recovered: float
    steps_lost: int
    same_bits: bool
    broken: tuple[str, ...] = ()
    liar: str = ""
    skipped: str = ""

    @property
    def first(self) -> Said | None:
        """The first verdict that was acted upon."""
        return next((one for one in self.said if one.act), None)

    @property
    def again(self) -> tuple[Said, ...]:
        """What was acted upon in generations after the first verdict's, where nothing happened any more."""
        first = self.first
        return tuple(one for one in self.said if first is not None and one.act and one.generation > first.generation)

    @property
    def named(self) -> bool:
        """Whether the first verdict names whom it should, and no other; of lies, whether every verdict does."""
        first, rank = self.first, self.trial.rank
        if first is None:
            return False
        match KINDS[self.trial.kind].culprit:
            case Culprit.PAIR:
                return first.nodes == (self.node,) or (rank in first.ranks and len(first.ranks) == 2)
            case Culprit.EDGES:
                return rank in first.ranks
            case Culprit.SAMPLES:
                return (first.nodes, first.samples) == ((), self.trial.samples)
            case Culprit.LIARS:
                named = {node for said in self.said if said.act for node in said.nodes}
                return bool(named) and named <= {self.node, self.liar}
            case _ if KINDS[self.trial.kind].lies:
                return all(said.nodes == (self.node,) for said in self.said if said.act)
            case _:
                return first.nodes == (self.node,)

    @property
    def classed(self) -> bool:
        """Whether the first verdict has the right class, and a lie was found in as many steps as it may take."""
        kind, first = KINDS[self.trial.kind], self.first
        if first is None or first.fault not in kind.faults:
            return False
        return not kind.lies or 0 <= first.step - self.trial.step <= kind.steps

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "trial": str(self.trial),
            "node": self.node,
            "happened": self.happened,
            "verdicts": [
                {"fault": one.fault, "nodes": list(one.nodes), "act": one.act, "after": round(one.after, 2)}
                for one in self.said
            ],
            "recovered": None if math.isnan(self.recovered) else round(self.recovered, 2),
            "steps_lost": self.steps_lost,
            "same_bits": self.same_bits,
            "broken": list(self.broken),
            "skipped": self.skipped or None,
        }


def skipped(trial: Trial, why: str) -> Result:
    """Return the result of a trial that cannot be played here."""
    return Result(
        trial=trial,
        node="",
        happened=False,
        said=(),
        recovered=math.nan,
        steps_lost=0,
        same_bits=False,
        skipped=why,
    )
