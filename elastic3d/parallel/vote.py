"""The step vote: one sum over the world that gives every rank the same answers to all questions of a step.

Every rank writes its own places of one float64 vector, and zeros elsewhere, so that the sum only gathers and rounds no
value. The vector holds, in this order: a row of flags per rank; where steps are measured, the numbers of every eighth
rank (`health.sheet`); for each rank and each number that scripts log, its value and whether there is one; the loss of
each micro-batch; its count of tokens plus one, zero where the loss is a mean; the
count and the keyed sum of the samples, and those of the excluded ones; for each parameter how many ranks got a
gradient; when gradients are clipped or measured, for each row (index of dim 0) of each parameter the sum of its
squares; and, where they are measured, those of the gradients of each leaf of micro-batches (`leaf_squares`). No
layout cuts a row, and rows are added elementwise in a fixed order, so that losses and norms are the same for any
layout.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from elastic3d.data.positions import fold_sums
from elastic3d.errors import UsageError
from elastic3d.health import sheet
from elastic3d.health.sheet import WIDTH, Row
from elastic3d.parallel import norms
from elastic3d.parallel.leaf_squares import LeafPlaces
from elastic3d.parallel.norms import RowSquares

FLAGS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """One rank's vote. losses: by number of micro-batch. rows: the sums of squares, on the CPU.

    checkpoint: one is due. unsaved: seconds since the last one began. ready: this rank's host is done with the previous
    one. finite: its part of the gradient is finite, or was not checked. tokens: by number of micro-batch, if losses are
    sums. snapshot_needs: the least number of steps between snapshots that is right for this rank, 0.0 if any is.
    excluded: how many samples it loaded that do not count; excluded_sum: their keyed sum. row: of its last steps, ()
    for none. last: a number for the outcome of the vote before, 0.0 for none. disputes: another rank's update does not
    look right. scalars: what its script logs of the step, None for what it does not. tells: it has something to tell
    that is gathered after the vote. leaf_squares: its places of the squares of leaves, None where they are not
    measured.
    """

    leave: bool = False
    etcd_away: bool = False
    checkpoint: bool = False
    unsaved: float = 0.0
    ready: bool = True
    finite: bool = True
    held: int = -1
    snapshot_needs: float = 0.0
    losses: Mapping[int, float] = field(default_factory=dict)
    tokens: Mapping[int, float] = field(default_factory=dict)
    samples: int = 0
    sample_sum: int = 0
    excluded: int = 0
    excluded_sum: int = 0
    present: frozenset[str] = frozenset()
    rows: RowSquares = field(default_factory=RowSquares)
    last: float = 0.0
    disputes: bool = False
    extras: float = 0.0
    row: Row = ()
    scalars: Sequence[float | None] = ()
    tells: bool = False
    leaf_squares: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the world decided; equal on every rank.

    leave, etcd_away: every rank said so. checkpoint: some rank said that one is due, and every rank that it is ready: a
    store slower than training delays checkpoints and tears none. due: some rank said that one is. unsaved: the most
    seconds since the last one began. safe_step: the least of the steps held. loss: mean over micro-batches, or over
    tokens. tokens: their number, None if losses are means. norm: of the gradient as it was summed, None if rows were
    not voted on. absent: parameters that got no gradient anywhere. snapshot_needs: the most that any rank needs, which
    is `snapshot_rank`. broken: numbers of the micro-batches whose loss is not finite. empty: none of them counts.
    sheets: the rows of the ranks whose turn it is, with `health.sheet`. last_outcomes: what each rank said of the vote
    before, none where all said the same. disputed_by: ranks that say that another's update does not look right.
    scalars: what the ranks' scripts logged, in the order of ranks, () for what none did. tells: some rank has something
    to tell besides. leaf_squares: the squared norm of each leaf's gradient as it was summed, zero for one that does not
    count, () where they are not measured; micro_tokens: with them, of each micro-batch its number of tokens, () if
    losses are means.
    """

    leave: bool
    etcd_away: bool
    checkpoint: bool
    due: bool
    unsaved: float
    safe_step: int
    snapshot_needs: float
    snapshot_rank: int
    loss: float
    tokens: float | None
    norm: float | None
    gradients_finite: bool
    samples: int
    sample_sum: int
    absent: frozenset[str]
    last_outcomes: tuple[float, ...] = ()
    disputed_by: tuple[int, ...] = ()
    extras: tuple[float, ...] = ()
    excluded: int = 0
    excluded_sum: int = 0
    broken: tuple[int, ...] = ()
    empty: bool = False
    sheets: tuple[Row, ...] = ()
    scalars: tuple[tuple[float, ...], ...] = ()
    tells: bool = False
    leaf_squares: tuple[float, ...] = ()
    micro_tokens: tuple[float, ...] = ()

    @property
    def finite(self) -> bool:
        """Whether loss and gradient are finite, so that the step can be made."""
        return self.gradients_finite and math.isfinite(self.loss) and (self.norm is None or math.isfinite(self.norm))


class Paper:
    """The places of the vector, from what all ranks know: world, micro-batches, parameters as (name, rows) in order.

    sheets: steps are measured. scalars: how many numbers of scripts there are places for. leaves: where the squares of
    leaves stand, None for a run that does not measure them.
    """

    def __init__(
        self,
        *,
        world: int,
        micro_batches: int,
        parameters: Sequence[tuple[str, int]],
        sheets: bool = False,
        scalars: int = 0,
        leaves: LeafPlaces | None = None,
    ) -> None:
        self._leaves = leaves
        self._world, self.micro_batches, self.scalars = world, micro_batches, scalars
        self._names = [name for name, _ in parameters]
        self._sheets_at = FLAGS * world
        self._scalars_at = self._sheets_at + (WIDTH * sheet.places(world) if sheets else 0)
        self._losses_at = self._scalars_at + 2 * scalars * world
        self._tokens_at = self._losses_at + micro_batches
        self._samples_at = self._tokens_at + micro_batches
        self._present_at = self._samples_at + 4
        self._rows_at = self._present_at + len(parameters)
        self._row: dict[str, int] = {}
        self._placed: tuple[tuple[str, int, int], ...] = ()
        self._runs: list[tuple[int, int, int]] = []
        at = self._rows_at
        for name, rows in parameters:
            self._row[name] = at
            at += rows
        self._size = at

    def fill(self, rank: int, ballot: Ballot, *, norm: bool, step: int = 0) -> torch.Tensor:
        """Return this rank's vector, on the CPU. norm: with rows. step: that is voted on."""
        votes = torch.zeros(self._size if norm else self._rows_at, dtype=torch.float64)
        asked = (ballot.leave, ballot.etcd_away, ballot.checkpoint, ballot.ready)
        flags = (
            *asked,
            ballot.held,
            ballot.finite,
            ballot.snapshot_needs,
            ballot.last,
            ballot.disputes,
            ballot.extras,
            ballot.tells,
            ballot.unsaved,
        )
        votes[FLAGS * rank : FLAGS * (rank + 1)] = torch.tensor([float(flag) for flag in flags], dtype=torch.float64)
        if ballot.row and self._scalars_at > self._sheets_at and sheet.speaks(rank, step):
            at = self._sheets_at + rank // sheet.EVERY * WIDTH
            votes[at : at + WIDTH] = torch.tensor(ballot.row, dtype=torch.float64)
        for number, value in enumerate(ballot.scalars):
            if value is not None:
                at = self._scalars_at + 2 * (self.scalars * rank + number)
                votes[at], votes[at + 1] = value, 1.0
        for index, loss in ballot.losses.items():
            votes[self._losses_at + index] = loss
        for index, count in ballot.tokens.items():
            votes[self._tokens_at + index] = 1.0 + count
        votes[self._samples_at] = ballot.samples
        votes[self._samples_at + 1] = ballot.sample_sum
        votes[self._samples_at + 2] = ballot.excluded
        votes[self._samples_at + 3] = ballot.excluded_sum
        there = [float(name in ballot.present) for name in self._names]
        votes[self._present_at : self._rows_at] = torch.tensor(there, dtype=torch.float64)
        if norm:
            for at, begin, end in self._runs_of(ballot.rows.places):
                votes[at : at + end - begin] = ballot.rows.values[begin:end]
        return votes if ballot.leaf_squares is None else torch.cat([votes, ballot.leaf_squares])

    def _runs_of(self, places: tuple[tuple[str, int, int], ...]) -> Sequence[tuple[int, int, int]]:
        """Return where rows go, and which they are: rows that follow each other in both vectors as one run."""
        if places != self._placed:
            self._placed, self._runs = places, []
            begin = 0
            for name, first, number in places:
                at, end = self._row[name] + first, begin + number
                if self._runs and self._runs[-1][0] + begin - self._runs[-1][1] == at:
                    at, begin, _ = self._runs.pop()
                self._runs.append((at, begin, end))
                begin = end
        return self._runs

    def read(
        self,
        votes: torch.Tensor,
        *,
        norm: bool,
        step: int = 0,
        excluded: Collection[int] = (),
        sizes: Sequence[int] = (),
    ) -> Outcome:
        """Return the outcome of the summed vector. norm, step: as it was filled. excluded: what does not count.

        sizes: the samples of each micro-batch, by which means are weighed; () where all have as many.
        """
        counted = [number for number in range(self.micro_batches) if number not in excluded]
        measured = self._leaves is not None and len(votes) > self._size
        flags = votes[: self._sheets_at].view(self._world, FLAGS)
        rows = votes[self._sheets_at : self._scalars_at].view(-1, WIDTH).tolist()
        losses = votes[self._losses_at : self._tokens_at].tolist()
        places = votes[self._tokens_at : self._samples_at].tolist()
        tokens = _tokens([places[number] for number in counted])
        weights = sizes if sizes and tokens is None else [1] * self.micro_batches
        total = 0.0
        for number in counted:
            total += losses[number] * weights[number]
        present = votes[self._present_at : self._rows_at].tolist()
        last, disputes, extras = flags[:, 7], flags[:, 8], flags[:, 9]
        return Outcome(
            leave=bool((flags[:, 0] != 0).all()),
            etcd_away=bool((flags[:, 1] != 0).all()),
            checkpoint=bool((flags[:, 2] != 0).any() and (flags[:, 3] != 0).all()),
            due=bool((flags[:, 2] != 0).any()),
            unsaved=float(flags[:, 11].max()),
            safe_step=int(flags[:, 4].min()),
            snapshot_needs=float(flags[:, 6].max()),
            snapshot_rank=int(flags[:, 6].argmax()),
            loss=_mean(total, sum(weights[number] for number in counted) if tokens is None else tokens),
            tokens=tokens,
            gradients_finite=bool((flags[:, 5] != 0).all()),
            norm=norms.norm(votes[self._rows_at : self._size]) if norm else None,
            samples=int(votes[self._samples_at]),
            sample_sum=fold_sums([int(votes[self._samples_at + 1])]),
            excluded=int(votes[self._samples_at + 2]),
            excluded_sum=fold_sums([int(votes[self._samples_at + 3])]),
            broken=tuple(number for number in counted if not math.isfinite(losses[number])),
            empty=not counted,
            absent=frozenset(name for name, count in zip(self._names, present, strict=True) if not count),
            last_outcomes=tuple(last.tolist()) if bool((last != last[0]).any()) else (),
            disputed_by=tuple(torch.nonzero(disputes).reshape(-1).tolist()),
            extras=tuple(extras.tolist()) if bool((extras != extras[0]).any()) else (),
            sheets=tuple(map(tuple, rows[: len(sheet.speakers(step, self._world))])),
            scalars=self._logged(votes),
            tells=bool((flags[:, 10] != 0).any()),
            leaf_squares=self._leaves.fold(votes[self._size :]) if self._leaves is not None and measured else (),
            micro_tokens=tuple(max(0.0, place - 1.0) for place in places) if measured and tokens is not None else (),
        )

    def _logged(self, votes: torch.Tensor) -> tuple[tuple[float, ...], ...]:
        if not self.scalars:
            return ()
        ranks = votes[self._scalars_at : self._losses_at].view(self._world, self.scalars, 2).tolist()
        return tuple(tuple(value for value, there in column if there) for column in zip(*ranks, strict=True))


def _tokens(places: Sequence[float]) -> float | None:
    if not any(places):
        return None
    if not all(places):
        raise UsageError(
            "the loss function returned a pair (sum, count) for some micro-batches and a mean for others; return one "
            "kind for all"
        )
    return sum(place - 1.0 for place in places)


def _mean(total: float, count: float) -> float:
    return total / count if count else math.nan
