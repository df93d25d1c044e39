"""A hearing convicts by two independent witnesses against one, and otherwise nobody."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic3d.health.hearing import Finding, Hearing, Statement, decided, hear

RIGHT, WRONG, OTHER = 11, 22, 33


def said(*rows: tuple[int, int, int | None], nodes: Sequence[str] = "abcd", devices: Sequence[str] = "kkkk") -> Hearing:
    """rank, what it came to at first, what it repeated; 0 for nothing. Every rank is a node of its own."""
    given = []
    for rank, first, again in rows:
        for digest, repeated in ((first, False), (again, True)):
            if digest:
                given.append(
                    Statement(rank=rank, node=nodes[rank], device=devices[rank], digest=digest, repeated=repeated)
                )
    return hear(given)


CASES = {
    "nobody differs": (said((0, RIGHT, 0), (1, RIGHT, 0)), Finding.AGREED, ()),
    "the runner lies": (said((0, WRONG, WRONG), (1, RIGHT, RIGHT), (2, 0, RIGHT)), Finding.PERSISTENT, (0,)),
    "the auditor lies": (said((0, RIGHT, RIGHT), (1, WRONG, WRONG), (2, 0, RIGHT)), Finding.PERSISTENT, (1,)),
    "it lies anew each time": (said((0, WRONG, OTHER), (1, RIGHT, RIGHT), (2, 0, RIGHT)), Finding.PERSISTENT, (0,)),
    "it was an accident": (said((0, WRONG, RIGHT), (1, RIGHT, RIGHT), (2, 0, RIGHT)), Finding.TRANSIENT, (0,)),
    "two accidents": (said((0, WRONG, RIGHT), (1, OTHER, RIGHT), (2, 0, RIGHT)), Finding.TRANSIENT, (0, 1)),
    "the third one lies": (said((0, WRONG, RIGHT), (1, RIGHT, RIGHT), (2, 0, OTHER)), Finding.PERSISTENT, (2,)),
    "all differ": (said((0, WRONG, WRONG), (1, RIGHT, RIGHT), (2, 0, OTHER)), Finding.UNDECIDED, ()),
    "all differ each time": (said((0, 1, 2), (1, 3, 4), (2, 0, 5)), Finding.NONDETERMINISTIC, ()),
    "dp 2, both stand by it": (said((0, WRONG, WRONG), (1, RIGHT, RIGHT)), Finding.UNDECIDED, ()),
    "dp 2, an accident": (said((0, WRONG, RIGHT), (1, RIGHT, RIGHT)), Finding.TRANSIENT, (0,)),
    "two pairs": (
        said((0, WRONG, WRONG), (1, RIGHT, RIGHT), (2, 0, RIGHT), (3, 0, WRONG)),
        Finding.NONDETERMINISTIC,
        (),
    ),
    "witnesses of one node": (
        said((0, WRONG, WRONG), (1, RIGHT, RIGHT), (2, 0, RIGHT), nodes="abbd"),
        Finding.UNDECIDED,
        (),
    ),
    "a device of another kind": (
        said((0, WRONG, WRONG), (1, RIGHT, RIGHT), (2, 0, RIGHT), devices="xkk"),
        Finding.NONDETERMINISTIC,
        (),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_table(name: str) -> None:
    """Each kind of dissent has its outcome."""
    got, outcome, culprits = CASES[name]
    assert (got.finding, got.culprits) == (outcome, culprits), got.detail
    assert got.finding is Finding.AGREED or got.detail


def test_numbers_that_are_not_finite_on_every_rank_are_no_devices_fault() -> None:
    """The same bits everywhere: the sample or the model made them."""
    given = [
        Statement(rank=rank, node=str(rank), device="k", digest=WRONG, finite=False, repeated=again)
        for rank, again in ((0, False), (0, True), (1, False), (1, True), (2, True))
    ]
    assert hear(given).finding is Finding.NOT_FINITE


@given(
    liars=st.sets(st.integers(0, 5), max_size=2),
    lies=st.lists(st.integers(100, 1 << 40), min_size=12, max_size=12, unique=True),
    ranks=st.integers(2, 6),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=500, deadline=None)
def test_the_honest_are_never_convicted(liars: set[int], lies: list[int], ranks: int, order: object) -> None:
    """Whatever up to two liars say, as long as they do not come to the same wrong bits on two nodes."""
    given = [
        Statement(
            rank=rank,
            node=str(rank),
            device="k",
            digest=lies[2 * rank + repeated] if rank in liars else RIGHT,
            repeated=bool(repeated),
        )
        for rank in range(ranks)
        for repeated in (0, 1)
    ]
    order.shuffle(given)  # type: ignore[attr-defined]
    got = hear(given)
    assert set(got.culprits) <= liars
    honest = ranks - len(liars & set(range(ranks)))
    if honest >= 2:
        assert set(got.culprits) == liars & set(range(ranks))


def test_the_order_of_statements_is_no_matter() -> None:
    """Ranks speak in any order, and everyone comes to the same outcome."""
    given = [
        Statement(rank=0, node="a", device="k", digest=WRONG),
        Statement(rank=0, node="a", device="k", digest=WRONG, repeated=True),
        Statement(rank=1, node="b", device="k", digest=RIGHT),
        Statement(rank=1, node="b", device="k", digest=RIGHT, repeated=True),
        Statement(rank=2, node="c", device="k", digest=RIGHT, repeated=True),
    ]
    assert len({hear(order) for order in itertools.permutations(given)}) == 1


@pytest.mark.parametrize(
    ("failed", "nodes", "culprits"),
    [((0,), "ab", (0,)), ((1,), "ab", (1,)), ((0, 1), "ab", ()), ((), "ab", ()), ((0,), "aa", ()), ((2,), "ab", ())],
)
def test_a_known_product_decides_between_two(failed: Sequence[int], nodes: str, culprits: tuple[int, ...]) -> None:
    """Where one of them errs in it and the other one, on another node, does not; both may be honest else."""
    given = [
        Statement(rank=rank, node=nodes[rank], device="k", digest=digest, repeated=again)
        for rank, digest in ((0, WRONG), (1, RIGHT))
        for again in (False, True)
    ]
    got = decided(hear(given), given, failed)
    assert got.culprits == culprits
    assert got.finding is (Finding.PERSISTENT if culprits else Finding.UNDECIDED)
    assert "known" in got.detail
