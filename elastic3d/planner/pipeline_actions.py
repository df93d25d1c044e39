"""The order in which each pipeline rank computes: schedules of torch.distributed.pipelining as lists of actions.

Sources: GPipe (Huang et al. 2019, arXiv 1811.06965); 1F1B and its interleaved form (Narayanan et al. 2021, arXiv
2104.04473); zero bubble and ZB-V (Qi et al. 2024, arXiv 2401.10241); DualPipe in its V form (DeepSeek-V3 2024, arXiv
2412.19437, and Qi's cut in half of it). A test compares with torch at the edges of each.
"""

from __future__ import annotations

from collections import Counter, deque
from enum import StrEnum
from typing import NamedTuple

from elastic3d.values import Schedule


class Pass(StrEnum):
    """What a stage computes of a micro-batch. BACKWARD is both gradients at once; INPUT and WEIGHT are one of them."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT = "input"
    WEIGHT = "weight"


class Action(NamedTuple):
    """One stage's share of one micro-batch."""

    kind: Pass
    stage: int
    micro_batch: int


F, B, I, W = Pass.FORWARD, Pass.BACKWARD, Pass.INPUT, Pass.WEIGHT  # noqa: E741


class _Rank:
    """The actions of one rank so far. For each kind of action the micro-batches of a stage come in turn."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._next: Counter[tuple[Pass, int]] = Counter()
        self._owed: deque[int] = deque()

    def add(self, *actions: tuple[Pass, int]) -> None:
        for kind, stage in actions:
            self.actions.append(Action(kind, stage, self._next[kind, stage]))
            for counted in (I, W) if kind is B else (kind,):
                self._next[counted, stage] += 1
            if kind is B:
                self._next[B, stage] = self._next[I, stage]
            elif kind is I:
                self._next[B, stage] += 1
                self._owed.append(stage)
            elif kind is W:
                self._owed.remove(stage)

    def pay(self) -> None:
        """Add the gradients of weights that have been owed longest, if any are."""
        if self._owed:
            self.add((W, self._owed[0]))

    def count(self, kind: Pass, stage: int) -> int:
        return self._next[kind, stage]


def orders(schedule: Schedule, *, pp: int, rounds: int, virtual: int = 1) -> list[list[Action]]:
    """Return the actions of each of `pp` ranks for `rounds` micro-batches, in order. The combination must be legal."""
    made = []
    for rank in range(pp):
        actions = _Rank()
        match schedule:
            case Schedule.GPIPE:
                actions.add(*[(F, rank)] * rounds, *[(B, rank)] * rounds)
            case Schedule.ONE_F_ONE_B:
                _one_f_one_b(actions, rank, pp, rounds)
            case Schedule.INTERLEAVED | Schedule.ZERO_BUBBLE:
                _interleaved(actions, rank, pp, rounds, virtual, split=schedule is Schedule.ZERO_BUBBLE)
            case Schedule.ZBV:
                _zbv(actions, rank, pp, rounds)
            case Schedule.DUALPIPE_V:
                _dualpipe_v(actions, rank, pp, rounds)
        made.append([action for action in actions.actions if action.micro_batch < rounds])
    return made


def _one_f_one_b(to: _Rank, rank: int, pp: int, rounds: int) -> None:
    warm = min(pp - 1 - rank, rounds)
    to.add(*[(F, rank)] * warm, *[(F, rank), (B, rank)] * (rounds - warm), *[(B, rank)] * warm)


def _interleaved(to: _Rank, rank: int, pp: int, rounds: int, virtual: int, *, split: bool) -> None:
    """Go through the rank's stages in turns of about pp micro-batches; with `split`, weights follow `rank` later."""
    turn = rounds // max(1, rounds // pp)
    total = rounds * virtual
    warm = min((virtual - 1) * turn + (1 if split else 2) * (pp - 1 - rank), total)
    stages = [(number // turn) % virtual * pp + rank for number in range(total)]
    mirrored = [(virtual - 1 - (number // turn) % virtual) * pp + rank for number in range(total)]
    to.add(*((F, stage) for stage in stages[:warm]))
    for number, stage in enumerate(mirrored):
        if warm + number < total:
            to.add((F, stages[warm + number]))
        to.add((I if split else B, stage))
        if split and number >= rank:
            to.pay()
    for _ in range(min(rank, total) if split else 0):
        to.pay()


def _zbv(to: _Rank, rank: int, pp: int, rounds: int) -> None:
    """Go down the V on one of the rank's stages and up on the other; as torch, plan at least 2 pp - 1 micro-batches."""
    down, up = rank, 2 * pp - 1 - rank
    planned = max(2 * pp - 1, rounds)
    to.add(*[(F, down)] * (2 * (pp - rank) - 1))
    to.add(*[(F, up), (F, down)] * rank)
    to.add(*[(F, up), (I, up), (W, up)] * (pp - rank))
    while to.count(F, up) < to.count(F, down) or to.count(F, down) < planned:
        if to.count(F, down) < planned:
            to.add((F, down))
        to.add((I, down), (W, down), (F, up), (I, up), (W, up))
    to.add(*[(I, down), (I, up)] * rank)
    to.add(*[(I, down), (W, down)] * (pp - rank))
    for stage in (up, down):
        to.add(*[(W, stage)] * (to.count(I, stage) - to.count(W, stage)))


def _dualpipe_v(to: _Rank, rank: int, pp: int, rounds: int) -> None:
    """Pair forwards of one stage with backwards of the other; split backwards only while ranks fill and drain."""
    down, up = rank, 2 * pp - 1 - rank
    after = pp - 1 - rank
    to.add(*[(F, down)] * (2 * after))
    to.add(*[(F, down), (F, up)] * (rank + 1))
    for _ in range(after):
        to.add((I, up))
        to.pay()
        to.add((F, up))
    to.add(*[(F, down), (B, up), (F, up), (B, down)] * (rounds - 2 * pp + rank + 1))
    to.add(*[(B, up), (F, up), (B, down)] * after)
    ends = [stage for _ in range(rank + 1) for stage in (up, down)]
    whole = rank + 1  # as many of the last backwards stay whole as are split
    to.add(*((B if number < whole else I, stage) for number, stage in enumerate(ends)))
    for _ in range(after):
        to.pay()
        to.add((I, down))
    for _ in range(rank + 1):
        to.pay()
