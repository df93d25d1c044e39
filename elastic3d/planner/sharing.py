"""How many micro-batches each data-parallel column should compute where columns differ in speed: pure functions.

A column is busy for 1 / x with each of its leaves, x being its speed. Turns of leaves meet in an exchange, and a column
may be one turn ahead of it (`parallel/reduction`): with d_i the time until which column i has computed, and e_t that
at which the exchange of turn t ends,

    d_i = max(d_i, e_(t - 2)) + 1 / x_i    for the senders i of turn t
    e_t = max(e_(t - 1), d_i of its senders)

so that a step takes e of its last turn. If a column could not be ahead it would begin each turn at e_(t - 1), and to
sit out would gain little over going on without the slow column. In leaves of a column that is not slow:

    columns  leaves  one at speed  equal shares  none ahead  one turn ahead  without the slow one
       4       16        0.5            8             6             5                 6
       4       32        0.7           11.4          10.9           9                11
       8       64        0.7           11.4           9.4           9                10
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic3d.owners import Owners
from elastic3d.values import Layout

AHEAD = 1
"""Turns by which a column may be ahead of the exchange: what the lanes of the ordered reduction have room for."""

MOVED = 1024
"""Most leaves that are given from slow columns to others."""


def met(shares: Sequence[int], leaves: int, speeds: Sequence[float], ahead: int = AHEAD) -> float:
    """Return how long a step of so many leaves takes, in leaves of a column of speed 1. speeds: of each column."""
    owners = Owners(dp=len(speeds), shares=tuple(shares))
    busy, ends = [0.0] * len(speeds), [0.0]
    for number, turn in enumerate(owners.steps_turns(leaves)):
        begins = ends[max(0, number - ahead)]
        for column in turn.senders:
            busy[column] = max(busy[column], begins) + 1.0 / speeds[column]
        ends.append(max(ends[-1], *(busy[column] for column in turn.senders)))
    return ends[-1]


def column_speeds(layout: Layout, slots: int, speeds: Sequence[float]) -> tuple[float, ...]:
    """Return the speed of each column of a layout without stages, on nodes of so many slots; 1 for each without any."""
    if not speeds:
        return (1.0,) * layout.dp
    width = layout.cp * layout.tp
    return tuple(
        min(speeds[rank // slots] for rank in range(column * width, (column + 1) * width))
        for column in range(layout.dp)
    )


def best_shares(leaves: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Return the shares with which a step of so many leaves is shortest; () if no other are better than equal ones.

    Beginning with equal ones, of which the fastest columns have the rest, a leaf after the other goes from the slowest
    column to the one that would be done with it first. Of equally good shares the first are taken, which leave the slow
    columns most. Those it begins with may be better already: without shares a column that has no leaf in the last turn
    computes one that nobody needs.
    """
    dp = len(speeds)
    if dp < 2 or len(set(speeds)) < 2 or leaves < dp:
        return ()
    shares = [leaves // dp] * dp
    for column in sorted(range(dp), key=lambda column: -speeds[column])[: leaves % dp]:
        shares[column] += 1
    best: tuple[int, ...] = ()
    least = -(-leaves // dp) / min(speeds)
    fastest = max(speeds)
    if leaves % dp and (seconds := met(shares, leaves, speeds)) < least * (1.0 - 1e-9):
        best, least = tuple(shares), seconds
    for _ in range(MOVED):
        slow = [column for column in range(dp) if speeds[column] < fastest and shares[column] > 1]
        if not slow:
            break
        giving = max(slow, key=lambda column: (shares[column] / speeds[column], -column))
        shares[giving] -= 1
        others = [column for column in range(dp) if column != giving]
        shares[min(others, key=lambda column: ((shares[column] + 1) / speeds[column], column))] += 1
        if max(shares) / fastest >= least:
            break
        if max(share / speed for share, speed in zip(shares, speeds, strict=True)) >= least:
            continue
        seconds = met(shares, leaves, speeds)
        if seconds < least * (1.0 - 1e-9):
            best, least = tuple(shares), seconds
    return best
