"""Who passes the entrance exam: the newcomer has to prove itself, and nobody else is blamed for it."""

from __future__ import annotations

import pytest

from elastic3d.health.exam import leaf_of, refused_ranks
from elastic3d.health.hearing import Statement, hear

RIGHT, WRONG, OTHER = 11, 22, 33


def refused(*rows: tuple[int, int], newcomers: set[int], devices: str = "kkkk") -> tuple[int, ...]:
    """Hold the exam and its hearing: for each rank, what it came to at first and what it repeated."""
    statements = [
        Statement(rank=rank, node=f"n{rank}", device=devices[rank], digest=digest, repeated=repeated)
        for rank, row in enumerate(rows)
        for digest, repeated in zip(row, (False, True), strict=True)
    ]
    return refused_ranks(hear(statements), {rank: row[0] for rank, row in enumerate(rows)}, newcomers)


SOUND, LIES, ERRS = (RIGHT, RIGHT), (WRONG, WRONG), (WRONG, RIGHT)


@pytest.mark.parametrize(
    ("rows", "newcomers", "out"),
    [
        ((SOUND, SOUND, LIES), {2}, (2,)),
        ((SOUND, SOUND, ERRS), {2}, (2,)),
        ((SOUND, ERRS, SOUND), {2}, ()),
        ((SOUND, LIES, SOUND), {2}, (1,)),
        ((SOUND, LIES), {1}, (1,)),
        ((SOUND, (WRONG, OTHER)), {1}, (1,)),
        ((SOUND, LIES), {0, 1}, ()),
        ((SOUND, LIES, (OTHER, OTHER)), {1, 2}, (1, 2)),
        ((SOUND, LIES, (OTHER, OTHER)), {2}, ()),
        ((SOUND, SOUND, LIES, LIES), {2, 3}, ()),
    ],
    ids=[
        "two know better",
        "it errs once, in one round of one",
        "an accident of one that was there",
        "the one that was there lies",
        "dp 2, one knows the answer",
        "dp 2, it lies anew each time",
        "dp 2, all are new",
        "two newcomers lie apart",
        "those who were there do not agree",
        "devices that part in pairs",
    ],
)
def test_who_is_set_aside(rows: tuple[tuple[int, int], ...], newcomers: set[int], out: tuple[int, ...]) -> None:
    """By two independent witnesses, or by those who were there before, if they agree."""
    assert refused(*rows, newcomers=newcomers) == out


def test_a_device_of_another_kind_is_not_blamed() -> None:
    """Devices of unlike kinds need not come to equal bits."""
    assert refused(SOUND, SOUND, LIES, newcomers={2}, devices="kkxx") == ()


def test_all_ranks_draw_the_same_leaf_and_all_leaves_are_drawn() -> None:
    """By the run's seed and the step."""
    assert {leaf_of(5, step, 4) for step in range(60)} == {0, 1, 2, 3}
