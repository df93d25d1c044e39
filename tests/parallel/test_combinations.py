"""Every legal combination against one process: the same losses, and the same bits where promised."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic3d.planner.schedules import VIRTUAL, problem
from elastic3d.training import Run
from elastic3d.values import Layout, Schedule
from tests.parallel import tensors
from tests.parallel.worlds import Orders, Report, run_world

pytestmark = [pytest.mark.gloo, pytest.mark.long]

RANKS = 8


def combinations(leaf: int = 1) -> Iterator[Layout]:
    """Yield every layout of up to eight ranks that the model of `train_deep` and its leaves allow."""
    for tp in (1, 2):
        for pp in (1, 2, 4):
            for dp in range(1, RANKS // pp // tp + 1):
                for zero in (1, 2, 3) if dp > 1 else (2,):
                    for replicas in [r for r in range(1, dp + 1) if dp % r == 0]:
                        for schedule in Schedule if pp > 1 else (None,):
                            virtual = VIRTUAL[schedule][0] if schedule else 1
                            sizes = {"pp": pp, "dp": dp, "tp": tp, "zero": zero, "replicas": replicas}
                            layout = Layout(**sizes, schedule=schedule, virtual=virtual)
                            if not problem(layout, blocks=tensors.DEEP, micro_batches=tensors.ROUNDS, leaf=leaf):
                                yield layout


LEGAL = [layout for layout in combinations() if layout.world > 1]
LEAVES = [layout for layout in combinations(leaf=2) if layout.world > 1]
DRAWN = random.Random(5).sample(LEGAL, 72)
DRAWN_LEAVES = random.Random(6).sample(LEAVES, 36)
DOZEN = [
    "pp=1,dp=2,zero=1",
    "pp=1,dp=3,zero=3",
    "pp=1,dp=4,zero=3,replicas=2",
    "pp=1,dp=2,tp=2,zero=2",
    "pp=2,dp=1,tp=2,zero=2,schedule=1f1b",
    "pp=2,dp=2,zero=3,schedule=gpipe",
    "pp=2,dp=2,zero=2,schedule=1f1b,cuts=3",
    "pp=2,dp=1,zero=2,schedule=interleaved,virtual=2",
    "pp=2,dp=2,zero=2,schedule=zero-bubble,virtual=2",
    "pp=2,dp=2,zero=1,schedule=zbv,virtual=2",
    "pp=2,dp=1,zero=2,schedule=dualpipev,virtual=2",
    "pp=4,dp=1,zero=2,schedule=1f1b",
]
DOZEN_LEAVES = [
    "pp=1,dp=3,zero=3",
    "pp=2,dp=2,zero=2,schedule=zbv,virtual=2",
    "pp=2,dp=3,zero=3,schedule=1f1b",
]
"""Some where dp does not divide the four leaves, and passes over the weights apart."""


def finished(reports: list[Report]) -> Any:
    for report in reports:
        assert report.ended == "done", report.error
    assert len({repr(report.result) for report in reports}) == 1
    return reports[0].result


@pytest.fixture(scope="module")
def alone() -> Any:
    """Digest, losses and norms of one process."""
    return finished(run_world(tensors.train_deep, Orders(layout=Layout(pp=1, dp=1))))


def agrees(layout: Layout, alone: Any, main: Callable[[Run], Any] = tensors.train_deep) -> None:
    digest, losses, norms = finished(run_world(main, Orders(layout=layout)))
    if layout.tp == 1:
        assert (digest, losses, norms) == alone
    else:
        assert losses == pytest.approx(alone[1], abs=1e-5)
        assert norms == pytest.approx(alone[2], abs=1e-5)


@pytest.mark.parametrize("layout", DOZEN)
def test_a_dozen_combinations_agree_with_one_process(layout: str, alone: Any) -> None:
    """One of each kind: bits where tp is 1, losses within 1e-5 elsewhere."""
    agrees(Layout.parse(layout), alone)


@pytest.mark.slow
@pytest.mark.parametrize("layout", DRAWN, ids=lambda layout: layout.request())
def test_drawn_combinations_agree_with_one_process(layout: Layout, alone: Any) -> None:
    """72 of all legal combinations on up to 8 processes."""
    agrees(layout, alone)


@pytest.fixture(scope="module")
def alone_in_leaves(alone: Any) -> Any:
    """Digest, losses and norms of one process with leaves of two micro-batches: close, but with bits of their own."""
    digest, losses, norms = finished(run_world(tensors.train_leaves, Orders(layout=Layout(pp=1, dp=1))))
    assert digest != alone[0]
    assert losses == pytest.approx(alone[1], abs=1e-5)
    return digest, losses, norms


@pytest.mark.parametrize("layout", DOZEN_LEAVES)
def test_leaves_agree_with_one_process(layout: str, alone_in_leaves: Any) -> None:
    """What is added up on a rank is the same wherever its leaf is run, and so are the bits."""
    agrees(Layout.parse(layout), alone_in_leaves, tensors.train_leaves)


@pytest.mark.slow
@pytest.mark.parametrize("layout", DRAWN_LEAVES, ids=lambda layout: layout.request())
def test_drawn_combinations_with_leaves_agree_with_one_process(layout: Layout, alone_in_leaves: Any) -> None:
    """36 of all legal combinations on up to 8 processes."""
    agrees(layout, alone_in_leaves, tensors.train_leaves)


def history(
    seed: int, folder: Path, legal: list[Layout] = LEGAL, main: Callable[[Run], Any] = tensors.train_drawn
) -> Any:
    """Go through three to five layouts drawn from `seed`, each from the state of the one before; return the end."""
    drawn = random.Random(seed)
    layouts = drawn.sample([layout for layout in legal if layout.tp == 1 and layout.world <= 6], drawn.randint(3, 5))
    took: Path | None = None
    for number, layout in enumerate(layouts):
        kept = folder / str(number)
        kept.mkdir()
        last = number == len(layouts) - 1
        leave = {} if last else dict.fromkeys(range(layout.world), drawn.randint(0, 1))
        reports = run_world(main, Orders(layout=layout, keep=kept, take=took, leave_at=leave))
        assert {report.ended for report in reports} <= {"done", "left"}, (seed, layout, reports[0].error)
        if reports[0].ended == "done":
            break
        took = kept
    return finished(reports)


@pytest.fixture(scope="module")
def undisturbed() -> Any:
    """One process, with dropout."""
    return finished(run_world(tensors.train_drawn, Orders(layout=Layout(pp=1, dp=1))))


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 33))])
def test_a_drawn_history_of_layouts_changes_no_bit(seed: int, undisturbed: Any, tmp_path: Path) -> None:
    """Whatever pp, dp, ZeRO stage, schedule and grouping the run goes through, it ends with the same bits."""
    assert history(seed, tmp_path)[0] == undisturbed[0]


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 17))])
def test_a_drawn_history_with_leaves_changes_no_bit(seed: int, tmp_path: Path) -> None:
    """The same for leaves of two micro-batches, which go whole to other ranks with each layout."""
    alone = finished(run_world(tensors.train_drawn_leaves, Orders(layout=Layout(pp=1, dp=1))))
    assert history(seed, tmp_path, LEAVES, tensors.train_drawn_leaves)[0] == alone[0]
