"""Health in figures: what it costs, who finds hangs how soon, and a score card of faults and controls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from chaos.bench import hangs, health_card, health_cost, health_cures
from chaos.bench.hangs import Verdict
from chaos.bench.health_cost import Cost
from chaos.bench.health_cures import Cure
from chaos.score.controls import Calm
from chaos.score.results import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of the measurement. faults: of the card, 0 for none. minutes: of controls, 0 for none. lanes: jobs at a time.

    pairs: of steps with and without health. width: of the model whose steps are timed, 10 blocks deep.
    """

    faults: int = 360
    minutes: float = 10.0
    lanes: int = 2
    seed: int = 1
    pairs: int = 20
    width: int = 640


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All of it. whole: nobody ended it before its time."""

    cost: Cost
    verdicts: tuple[Verdict, ...]
    cures: tuple[Cure, ...]
    results: tuple[Result, ...]
    calm: tuple[Calm, ...]
    whole: bool

    @property
    def passed(self) -> bool:
        """Whether the card and the controls pass every gate; times and costs are reported."""
        return self.whole and health_card.total(self.results, self.calm).passed

    def as_json(self) -> dict[str, Any]:
        """Return every figure."""
        return {
            "cost": health_cost.as_json(self.cost),
            "hangs": hangs.as_json(self.verdicts),
            "cures": health_cures.as_json(self.cures),
            "card": health_card.as_json(self.results, self.calm) | {"whole": self.whole},
        }


def measure(
    size: Size, *, say: Callable[[str], None] = lambda text: None, show: Callable[[Table], None] = lambda table: None
) -> Measured:
    """Measure the cost, the hangs of ours and of peers, and a cure; then the controls, then the card.

    say: told what is being done. show: given the tables of each part once it is measured.
    """
    cost = health_cost.measure(width=size.width, pairs=size.pairs, say=say)
    for table in health_cost.tables(cost):
        show(table)
    verdicts = tuple(hangs.measure(say))
    show(hangs.table(verdicts))
    cures = tuple(health_cures.measure(say, health_cures.ILL[:1]))
    show(health_cures.table(cures))
    calm = tuple(health_card.controls(size.minutes, say=say))
    results = health_card.faults(size.faults, seed=size.seed, lanes=size.lanes, say=say) if size.faults else ()
    for table in health_card.tables(results, calm):
        show(table)
    whole = len(results) == health_card.trials_of(size.faults)
    return Measured(cost=cost, verdicts=verdicts, cures=cures, results=results, calm=calm, whole=whole)
