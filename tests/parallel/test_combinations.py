"""Every legal combination against one process: the same losses, and the same bits where promised."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic3d.planner.schedules import VIRTUAL, problem
from elastic3d.values import Layout, Schedule
from tests.parallel import tensors
from tests.parallel.worlds import Orders, Report, run_world

pytestmark = [pytest.mark.gloo, pytest.mark.long]

RANKS = 8


def combinations() -> Iterator[Layout]:
    """Yield every layout of up to eight ranks that the model of `train_deep` and its micro-batches allow."""
    for tp in (1, 2):
        for pp in (1, 2, 4):
            for dp in range(1, RANKS // pp // tp + 1):
                for zero in (1, 2, 3) if dp > 1 else (2,):
                    for replicas in [r for r in range(1, dp + 1) if dp % r == 0]:
                        for schedule in Schedule if pp > 1 else (None,):
                            virtual = VIRTUAL[schedule][0] if schedule else 1
                            sizes = {"pp": pp, "dp": dp, "tp": tp, "zero": zero, "replicas": replicas}
                            layout = Layout(**sizes, schedule=schedule, virtual=virtual)
                            if not problem(layout, blocks=tensors.DEEP, micro_batches=tensors.ROUNDS):
                                yield layout


LEGAL = [layout for layout in combinations() if layout.world > 1]
DRAWN = random.Random(5).sample(LEGAL, 72)
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


def finished(reports: list[Report]) -> Any:
    for report in reports:
        assert report.ended == "done", report.error
    assert len({repr(report.result) for report in reports}) == 1
    return reports[0].result


@pytest.fixture(scope="module")
def alone() -> Any:
    """Digest, losses and norms of one process."""
    return finished(run_world(tensors.train_deep, Orders(layout=Layout(pp=1, dp=1))))


def agrees(layout: Layout, alone: Any) -> None:
    digest, losses, norms = finished(run_world(tensors.train_deep, Orders(layout=layout)))
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


def history(seed: int, folder: Path) -> Any:
    """Go through three to five layouts drawn from `seed`, each from the state of the one before; return the end."""
    drawn = random.Random(seed)
    layouts = drawn.sample([layout for layout in LEGAL if layout.tp == 1 and layout.world <= 6], drawn.randint(3, 5))
    took: Path | None = None
    for number, layout in enumerate(layouts):
        kept = folder / str(number)
        kept.mkdir()
        last = number == len(layouts) - 1
        leave = {} if last else dict.fromkeys(range(layout.world), drawn.randint(0, 1))
        reports = run_world(tensors.train_drawn, Orders(layout=layout, keep=kept, take=took, leave_at=leave))
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
