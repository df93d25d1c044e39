"""What is looked at in its turn, at what cost, and who left a vote with another outcome than the others."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic3d.health.custody import GRAIN, LEAST, MOST, LookBudget, Rotation, Split, outcome_digest, split, written
from elastic3d.parallel.numerics.update import Update
from elastic3d.parallel.vote import Outcome

SIZES = st.lists(st.integers(0, 5000), min_size=1, max_size=8)
NODES = ("a", "b", "c", "d")
ALIKE = ("cpu",) * 4


@given(sizes=SIZES, at=st.integers(0, 10_000), parts=st.lists(st.integers(1, 3000), min_size=1, max_size=5))
@settings(max_examples=300, deadline=None)
def test_every_byte_has_its_turn_within_one_rotation(sizes: list[int], at: int, parts: list[int]) -> None:
    """Whatever the sizes of the parts, and none is longer than asked for."""
    rotation = Rotation(sizes, at)
    seen = {(index, byte) for index, size in enumerate(sizes) for byte in range(size)}
    looks = 0
    while seen and looks < 20_000:
        part = max(GRAIN, parts[looks % len(parts)])
        taken = rotation.take(part)
        assert sum(one.stop - one.start for one in taken) <= part
        for one in taken:
            assert one.start % GRAIN == 0
            assert 0 <= one.start < one.stop <= sizes[one.index]
            seen -= {(one.index, byte) for byte in range(one.start, one.stop)}
        looks += 1
    assert not seen


@given(sizes=SIZES, nbytes=st.integers(0, 50_000))
@settings(max_examples=100, deadline=None)
def test_a_part_has_nothing_twice(sizes: list[int], nbytes: int) -> None:
    taken = Rotation(sizes, 777).take(nbytes)
    marks = sorted((one.index, one.start, one.stop) for one in taken)
    assert all(a[0] < b[0] or a[2] <= b[1] for a, b in itertools.pairwise(marks))


def test_a_machine_that_was_suspended_within_a_look_is_looked_at_again_soon() -> None:
    """A minute of it would otherwise be paid for by hours without a look."""
    allowance = LookBudget(0.005)
    allowance.stepped(0.1)
    allowance.spent(60.0, allowance.nbytes())
    steps = 0
    while not allowance.nbytes():
        allowance.stepped(0.1)
        steps += 1
    assert steps < 100


@pytest.mark.parametrize("seconds", [0.001, 0.1, 30.0])
@pytest.mark.parametrize("rate", [1e8, 7e9])
def test_looking_takes_no_more_than_its_share(seconds: float, rate: float) -> None:
    """Over all steps, whatever a look costs by itself; and nothing is kept for later."""
    allowance, spent, looked = LookBudget(0.005), 0.0, 0
    for _ in range(2000):
        allowance.stepped(seconds)
        nbytes = allowance.nbytes()
        assert nbytes == 0 or LEAST <= nbytes <= MOST
        if nbytes:
            took = 20e-6 + nbytes / rate
            spent, looked = spent + took, looked + nbytes
            allowance.spent(took, nbytes)
    assert spent <= 0.005 * seconds * 2000 + 0.001 + LEAST / rate
    assert looked > 0


@pytest.mark.parametrize(
    ("changed", "by_code"),
    [
        ([{7: 1}], False),
        ([{7: 2, 8: 1}], False),
        ([{7: 1}, {7: 1}], True),
        ([{7: 5}], True),
        ([dict.fromkeys(range(65), 1)], True),
        ([{0: 9, 1: 12, 2: 8}], True),
    ],
)
def test_what_code_writes_is_told_from_what_memory_loses(changed: list[dict[int, int]], by_code: bool) -> None:
    """Code writes numbers, in many bits, words or tensors; a few bits of a few words of one tensor are memory's."""
    assert written(changed) == by_code


OUTCOME = Outcome(
    leave=False,
    etcd_away=False,
    checkpoint=False,
    due=False,
    unsaved=0.0,
    safe_step=3,
    snapshot_needs=0.0,
    snapshot_rank=0,
    loss=1.5,
    tokens=None,
    norm=2.0,
    gradients_finite=True,
    samples=8,
    sample_sum=99,
    absent=frozenset({"x", "y"}),
)
CHANGE = Update(factor=0.5, norm=2.0, finite=True, skipped=False)


def test_the_digest_of_an_outcome_changes_with_its_last_bit() -> None:
    """A vote's sum carries it exactly; NaNs are alike, whatever their bits."""
    digest = outcome_digest(OUTCOME, CHANGE)
    assert digest == int(digest) < 1 << 53
    assert digest == outcome_digest(replace(OUTCOME, absent=frozenset({"y", "x"})), CHANGE)
    others = [
        (replace(OUTCOME, loss=math.nextafter(1.5, 2.0)), CHANGE),
        (replace(OUTCOME, absent=frozenset({"x"})), CHANGE),
        (replace(OUTCOME, safe_step=4), CHANGE),
        (replace(OUTCOME, due=True), CHANGE),
        (replace(OUTCOME, unsaved=0.5), CHANGE),
        (OUTCOME, replace(CHANGE, factor=math.nextafter(0.5, 1.0))),
        (OUTCOME, replace(CHANGE, skipped=True)),
    ]
    assert len({digest, *(outcome_digest(*one) for one in others)}) == 8
    nan = replace(OUTCOME, loss=math.nan)
    assert outcome_digest(nan, CHANGE) == outcome_digest(replace(OUTCOME, loss=-math.nan), CHANGE)


@pytest.mark.parametrize(
    ("digests", "nodes", "devices", "odd"),
    [
        ((7, 7, 7, 7), NODES, ALIKE, None),
        ((7, 7, 8, 7), NODES, ALIKE, (2,)),
        ((7, 8, 9, 7), NODES, ALIKE, ()),
        ((7, 7, 8, 8), NODES, ALIKE, ()),
        ((7, 8), NODES[:2], ALIKE[:2], ()),
        ((7, 7, 8), ("a", "a", "b"), ALIKE[:3], ()),
        ((7, 7, 7, 8), NODES, ("cpu", "cpu", "cpu", "other"), ()),
    ],
)
def test_who_is_odd(
    digests: tuple[float, ...], nodes: tuple[str, ...], devices: tuple[str, ...], odd: tuple[int, ...] | None
) -> None:
    """Only by a majority of two nodes at least, with devices of the same kind; of nobody else is anything sure."""
    said = split(digests, nodes, devices)
    assert (said.odd if isinstance(said, Split) else None) == odd
