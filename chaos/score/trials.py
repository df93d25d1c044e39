"""Trials: what happens to which rank of one job, at which step and under which layout, drawn from a seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chaos.score.kinds import BACK, KINDS, SHOWS, Kind
from elastic3d.owners import Owners
from elastic3d.values import Layout

GLOBAL_BATCH, MICRO_BATCH, BLOCKS, SEED = 16, 2, 5, 17
WITNESSES = Layout(pp=1, dp=4)
"""Who lies is found where three others do the same: two that agree, and a second liar."""

SQUARE = Layout(pp=2, dp=2)
"""Whose connection is slow is found where no two nodes are in the same groups."""

LAYOUTS = (SQUARE, Layout(pp=1, dp=4), Layout(pp=2, dp=1), Layout(pp=1, dp=2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One job: what happens to which rank after how many steps, under which layout."""

    kind: str
    rank: int
    step: int
    micro_batch: int
    layout: Layout

    @property
    def fault(self) -> str:
        """The fault as the script's option, "" for none."""
        kind = KINDS[self.kind]
        if kind.factor:
            return f"slow:{self.rank}@{self.step}:{kind.factor}"
        if kind.hogs or kind.share or kind.late:
            return ""
        return f"{kind.injector or self.kind}:{kind.of or self.rank}@{self.step}:{self.micro_batch}"

    @property
    def samples(self) -> tuple[tuple[int, int], ...]:
        """Positions of the run that are to be left out for it; none where it is not of the data."""
        if self.kind == "nan":
            first = self.step * GLOBAL_BATCH + self.micro_batch * MICRO_BATCH
            return ((first, first + MICRO_BATCH),)
        if self.kind == "spike":
            stop = self.step + SHOWS
            return (((stop - BACK) * GLOBAL_BATCH, stop * GLOBAL_BATCH),)
        return ()

    def __str__(self) -> str:
        return f"{self.fault or self.kind} with {self.layout}"


def trials(kinds: Sequence[str], count: int, seed: int, *, steps: int, most: int = 4) -> Iterator[Trial]:
    """Yield `count` trials of each kind, drawn from the seed. steps: of the job. most: nodes."""
    for kind in kinds:
        for number in range(count):
            draw = random.Random(f"{seed} {kind} {number}")
            # What leaves out an exchange, or changes one, needs somebody to exchange with.
            row = KINDS[kind]
            layouts = [one for one in LAYOUTS if one.world <= most and (not row.together or one.dp > 1)]
            layouts = [one for one in layouts if not row.between_two or one.dp <= 2]
            layout = WITNESSES if row.lies else SQUARE if row.late else draw.choice(layouts)
            rank, step = draw.randrange(layout.world), draw.randrange(row.from_step, max(row.from_step + 1, steps // 2))
            step = row.begins or (rechecked(step) if row.rechecked else step)
            yield Trial(
                kind=kind,
                rank=rank,
                step=step,
                micro_batch=pass_of(row, step, layout) if row.lies else draw.randrange(2),
                layout=layout,
            )


def rechecked(step: int) -> int:
    """Return the first step from this one on of which updates are computed again."""
    from elastic3d.health import recheck

    return next(one for one in itertools.count(step) if recheck.shift_at(one, (1,), seed=SEED) is not None)


def pass_of(row: Kind, step: int, layout: Layout) -> int:
    """Return which pass of a rank goes wrong: the first, or one whose gradients are compared, its own or an audit's."""
    if row.joins or row.rechecked:
        return 0
    count = GLOBAL_BATCH // MICRO_BATCH
    # It brings torch, for which nobody waits who only looks at the help.
    from elastic3d.health import audit

    plan = audit.plan(layout, budget=1.0, blocks=BLOCKS, counts=[count], nodes=range(layout.world))
    owners = Owners(dp=layout.dp, shares=layout.shares)
    audited = audit.audit_at(plan, step, seed=SEED, owners=owners, micro_batches=count)
    assert audited is not None
    return count // layout.dp if row.audits else audited.turns[0]
