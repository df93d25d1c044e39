"""Whose connection is slow, by what the ranks of a real job said of their steps, before and after one became so.

Two stages of two columns, ZeRO-3, a node each, on one machine of two processors that was busy besides; less so as time
went on. Then all that the last node sent and got was 10 ms late.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from elastic3d.health import blame, sheet
from elastic3d.health.sheet import StepSheet
from elastic3d.health.slow_node import SlowKind
from elastic3d.health.speeds import Speeds
from elastic3d.values import Layout, Schedule

LAYOUT = Layout(pp=2, dp=2, schedule=Schedule.ONE_F_ONE_B)
NODES = ("n0", "n1", "n2", "n3")

Said = tuple[int, ...]
"""Milliseconds of a step: forward, backward, data, update, host, copy, and waits along dp, along pp, and others."""

BUSY: Sequence[Sequence[Said]] = (
    (
        (172, 217, 7, 50, 0, 61, 729, 282, 47),
        (241, 285, 5, 41, 6, 34, 651, 249, 51),
        (144, 146, 21, 23, 6, 30, 549, 413, 211),
        (155, 203, 7, 49, 1, 41, 484, 390, 233),
    ),
    (
        (352, 377, 14, 40, 1, 51, 626, 109, 28),
        (339, 433, 19, 85, 4, 58, 585, 84, 17),
        (201, 319, 10, 40, 5, 39, 293, 539, 182),
        (162, 265, 14, 36, 3, 40, 381, 531, 179),
    ),
    (
        (261, 308, 9, 27, 22, 30, 682, 317, 60),
        (271, 340, 7, 67, 4, 51, 662, 265, 31),
        (217, 374, 13, 42, 3, 63, 321, 497, 183),
        (179, 227, 12, 31, 3, 30, 537, 511, 181),
    ),
)
CALM: Sequence[Sequence[Said]] = (
    (
        (124, 181, 10, 42, 3, 35, 323, 56, 29),
        (133, 198, 14, 37, 2, 39, 289, 69, 23),
        (71, 112, 3, 12, 3, 14, 181, 285, 116),
        (78, 124, 17, 24, 5, 23, 156, 266, 106),
    ),
    (
        (95, 140, 3, 20, 4, 31, 259, 134, 23),
        (84, 129, 7, 24, 5, 27, 279, 129, 20),
        (63, 102, 2, 28, 1, 21, 225, 197, 67),
        (65, 115, 11, 25, 2, 32, 208, 178, 76),
    ),
    (
        (120, 186, 5, 22, 0, 21, 207, 128, 29),
        (79, 89, 2, 17, 0, 16, 375, 108, 31),
        (56, 83, 5, 20, 3, 11, 200, 276, 63),
        (69, 78, 3, 15, 0, 12, 217, 241, 79),
    ),
    (
        (106, 128, 10, 24, 3, 23, 236, 87, 15),
        (96, 121, 2, 16, 3, 22, 251, 114, 23),
        (96, 124, 7, 26, 3, 23, 162, 141, 65),
        (86, 134, 4, 15, 1, 12, 158, 171, 63),
    ),
)
LATE: Sequence[Sequence[Said]] = (
    (
        (68, 97, 4, 16, 7, 11, 264, 1165, 287),
        (72, 88, 2, 15, 7, 9, 206, 1275, 227),
        (51, 66, 5, 12, 7, 14, 1371, 73, 315),
        (54, 69, 3, 14, 5, 10, 1161, 234, 368),
    ),
    (
        (99, 127, 3, 24, 8, 13, 516, 1790, 610),
        (158, 133, 3, 17, 12, 13, 311, 1948, 618),
        (76, 88, 3, 17, 6, 11, 2108, 180, 704),
        (91, 81, 5, 14, 7, 10, 1721, 378, 879),
    ),
    (
        (111, 126, 9, 28, 10, 16, 317, 1596, 319),
        (97, 105, 6, 23, 6, 10, 328, 1694, 261),
        (81, 118, 3, 26, 10, 17, 1762, 67, 468),
        (81, 102, 3, 20, 10, 10, 1588, 305, 411),
    ),
    (
        (86, 125, 3, 22, 4, 10, 249, 1333, 171),
        (101, 135, 10, 24, 6, 11, 163, 1405, 151),
        (69, 79, 3, 18, 6, 12, 1432, 17, 341),
        (69, 71, 2, 20, 8, 9, 965, 257, 605),
    ),
    (
        (92, 123, 6, 14, 9, 8, 286, 947, 299),
        (140, 120, 3, 13, 6, 10, 239, 1045, 208),
        (64, 71, 5, 19, 5, 12, 1185, 120, 321),
        (98, 85, 5, 16, 4, 9, 972, 223, 385),
    ),
    (
        (72, 102, 3, 15, 7, 13, 275, 1314, 208),
        (74, 94, 3, 11, 7, 7, 238, 1432, 144),
        (53, 66, 4, 13, 7, 9, 1458, 25, 363),
        (47, 56, 4, 19, 5, 10, 1188, 193, 475),
    ),
)


def sheets(said: Sequence[Said]) -> list[StepSheet]:
    """Return a row of all ranks."""
    names = ("forward", "backward", "data", "update", "host", "copy", "wait_dp", "wait_pp", "wait_other")
    return [
        StepSheet(work=1.0, rounds=4, **{name: one / 1000 for name, one in zip(names, each, strict=True)})
        for each in said
    ]


def heard(*rows: Sequence[Said]) -> Speeds:
    """Return what is found of these rows, one after another."""
    speeds = Speeds(1.15)
    speeds.begin("1.0", LAYOUT, NODES)
    for number, said in enumerate(rows):
        row = sheets(said)
        for vote in range(number * sheet.EVERY + 1, (number + 1) * sheet.EVERY + 1):
            speeds.heard(vote, [row[rank].row for rank in sheet.speakers(vote, len(row))])
    return speeds


@pytest.mark.parametrize("before", [(*CALM, *CALM), (*BUSY, *CALM, *CALM)], ids=["calm", "busy at first"])
def test_the_endpoint_is_named(before: Sequence[Sequence[Said]]) -> None:
    """Though all wait for its column in every pass, and though transfers took three times as long at first."""
    assert not heard(*before).slow
    found = heard(*before, *LATE).slow
    assert {id: (node.kind, node.ranks) for id, node in found.items()} == {"n3": (SlowKind.LINK, (3,))}


def test_a_pipeline_does_not_answer_for_what_its_ranks_wait_for_elsewhere() -> None:
    """The other column's last rank meets the late one in each pass, and its first one waits for that."""
    for said in LATE:
        taken = blame.transfers(LAYOUT, sheets(said))
        assert taken[0, 2] < 0.5 * taken[1, 3]
        assert taken[1, 3] < taken[2, 3]
