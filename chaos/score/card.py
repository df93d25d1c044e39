"""The card: one row for each kind over all its trials, and the gates that it has to pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chaos.score.kinds import KINDS
from chaos.score.results import Result

PRECISION, RECALL, CULPRITS = 1.0, 0.99, 0.98
"""Least values of each over all classes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One class over all its trials. p50, p95: seconds to a verdict, and in `recovered_p50` to the next step.

    trials: those that were played; skipped: those that could not be, and count for nothing. steps_lost: the most,
    lost_p50, lost_p95: of a trial; how many were made again.
    """

    kind: str
    trials: int
    precision: float
    recall: float
    culprits: float
    p50: float
    p95: float
    bar: float
    recovered_p50: float
    steps_lost: int
    lost_p50: float
    lost_p95: float
    same_bits: int
    skipped: int = 0

    @property
    def passed(self) -> bool:
        """Whether it was tried, and every gate is passed; times are only reported: a loaded machine is not at fault."""
        gates = self.precision >= PRECISION and self.recall >= RECALL and self.culprits >= CULPRITS
        return gates and self.same_bits == self.trials > 0


def card(results: Sequence[Result]) -> tuple[Row, ...]:
    """Return one row for each kind.

    Precision of a class: of the verdicts that were acted upon and are called so, how many were right; in a control, 1
    if nothing was acted upon. A fault that did not take place in its job counts as one that was not found.
    """
    rows = []
    skipped = [result.trial.kind for result in results if result.skipped]
    kinds = dict.fromkeys(result.trial.kind for result in results)
    results = [result for result in results if not result.skipped]
    for kind in kinds:
        own = [result for result in results if result.trial.kind == kind]
        names = set(KINDS[kind].faults)
        if KINDS[kind].control:
            quiet = sum(1 for result in own if result.first is None)
            precision = recall = culprits = quiet / max(1, len(own))
        else:
            called = [r for r in results if r.first is not None and r.first.fault in names]
            right = [bool(names & set(KINDS[r.trial.kind].faults)) and r.named for r in called]
            # Whoever is named while nothing happens counts against what it is called, and where it was.
            alarms = [False for r in results for said in r.again if said.fault in names or r.trial.kind == kind]
            precision = _share([*right, *alarms])
            recall = _share([r.happened and r.classed for r in own])
            culprits = _share([r.named for r in own])
        after = [result.first.after for result in own if result.first is not None]
        back = [result.recovered for result in own if not math.isnan(result.recovered)]
        rows.append(
            Row(
                kind=kind,
                trials=len(own),
                precision=precision,
                recall=recall,
                culprits=culprits,
                p50=quantile(after, 0.5),
                p95=quantile(after, 0.95),
                bar=KINDS[kind].bar,
                recovered_p50=quantile(back, 0.5),
                steps_lost=max((result.steps_lost for result in own), default=0),
                lost_p50=quantile([result.steps_lost for result in own], 0.5),
                lost_p95=quantile([result.steps_lost for result in own], 0.95),
                same_bits=sum(1 for result in own if result.same_bits),
                skipped=skipped.count(kind),
            )
        )
    return tuple(rows)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of the values does not exceed; NaN if there are none."""
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else math.nan


def _share(held: Sequence[Any]) -> float:
    return sum(map(bool, held)) / len(held) if held else 1.0
