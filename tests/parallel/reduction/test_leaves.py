"""Leaves: micro-batches that are added up where they are run, the same ones in every layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic3d.data import Growing, Order, Share
from elastic3d.errors import ConfigurationError, UsageError
from elastic3d.parallel.reduction.single_replica import SingleReplica
from elastic3d.training import Run, run_alone
from elastic3d.values import Layout
from tests.parallel import mains, numeric_mains
from tests.parallel.worlds import Orders, run_world

GROWN = Growing((0, 12), (2, 8))
"""6 and then 4 micro-batches, in leaves of 2."""


@given(st.integers(1, 9), st.integers(1, 6), st.integers(1, 7))
def test_every_leaf_is_run_once_and_in_order_by_one_rank(leaves: int, leaf: int, dp: int) -> None:
    """Whatever dp is: leaf l by rank l % dp; what fills the last turn up is beyond the step's micro-batches."""
    shares = [Share(dp=dp, index=index, leaf=leaf) for index in range(dp)]
    count = leaves * leaf
    for share in shares:
        mine = share.micro_batches(0, count)
        assert len(mine) == share.rounds(count) == len(share.wanted(0, count))
        assert mine == sorted(mine)
        assert {number // leaf % dp for number in mine} == {share.index}
        pairs = list(zip(mine, share.wanted(0, count), strict=True))
        assert all(wanted == number for number, wanted in pairs if number < count)
        assert all(wanted % leaf == number % leaf for number, wanted in pairs)
    run = sorted(number for share in shares for number in share.micro_batches(0, count))
    assert run[:count] == list(range(count))
    assert run[count:] == list(range(count, len(run)))


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=12), st.integers(1, 12), st.booleans())
def test_one_replica_adds_leaves_as_a_tree(pieces: list[float], leaf: int, apart: bool) -> None:
    """Pieces of a leaf in order, then leaves in order, also where gradients of weights have a pass of their own."""
    model = nn.Linear(1, 1, bias=False)
    reduction = SingleReplica(model, leaf=leaf)
    for round_, piece in enumerate(pieces):
        last = round_ == len(pieces) - 1
        reduction.hold() if apart else reduction.begin(round_, last=last)
        gradient = torch.full((1, 1), piece)
        model.weight.grad = gradient if model.weight.grad is None else model.weight.grad + gradient
        if apart:
            reduction.reduce(round_, last=last)
    reduction.finish()
    sums = []
    for start in range(0, len(pieces), leaf):
        total = torch.tensor(pieces[start])
        for piece in pieces[start + 1 : start + leaf]:
            total = total + piece
        sums.append(total)
    whole = sums[0]
    for total in sums[1:]:
        whole = whole + total
    assert model.weight.grad is not None
    assert float(model.weight.grad) == float(whole)
    assert reduction.present() == {"weight"}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The results of one rank, by precision."""
    return {precision: trained("pp=1,dp=1", precision).trained for precision in ("fp32", "bf16")}


def trained(layout: str, precision: str, *, leaf: int = 2, steps: int = 4) -> numeric_mains.Sent:
    main = partial(numeric_mains.train_sent, precision=precision, leaf=leaf, size=GROWN, steps=steps)
    reports = run_world(main, Orders(layout=Layout.parse(layout)))
    for report in reports:
        assert report.ended == "done", report.error
    result: numeric_mains.Sent = reports[0].result
    return result


@pytest.mark.gloo
@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ("pp=1,dp=2,zero=2", "fp32"),
        ("pp=1,dp=4,zero=3,replicas=2", "bf16"),
        ("pp=2,dp=2,zero=1,schedule=zero-bubble,virtual=2", "bf16"),
        pytest.param("pp=1,dp=3,zero=1", "bf16", marks=pytest.mark.slow),
        pytest.param("pp=2,dp=1,zero=3,schedule=gpipe", "fp32", marks=pytest.mark.slow),
        pytest.param("pp=2,dp=2,zero=2,schedule=zbv,virtual=2", "fp32", marks=pytest.mark.slow),
    ],
)
def test_leaves_keep_the_promise(layout: str, precision: str, alone: dict[str, Any]) -> None:
    """With dropout, clipping, a growing batch, and parameters that only some micro-batches of a leaf use."""
    mine = trained(layout, precision).trained
    assert (mine.digest, mine.losses) == (alone[precision].digest, alone[precision].losses)


@pytest.mark.gloo
@pytest.mark.long
def test_leaves_are_sent_once() -> None:
    """Two turns of 3 leaves over two ranks, where 6 micro-batches take 3 rounds; sums of bf16 are sent in fp32."""
    one, two = (trained("pp=1,dp=2,zero=2", "fp32", leaf=leaf, steps=1).exchanges for leaf in (1, 2))
    assert len(two) * 3 == len(one) * 2
    assert set(two) == set(one) == set(trained("pp=1,dp=2,zero=2", "bf16", steps=1).exchanges)


@pytest.mark.gloo
def test_a_state_of_other_leaves_is_refused(tmp_path: Path) -> None:
    """A run goes on with the leaves that it began with; the error says which those were."""
    begun = Orders(layout=Layout(pp=1, dp=1), keep=tmp_path, leave_at={0: 0})
    assert run_world(mains.train, begun)[0].ended == "left"
    (report,) = run_world(partial(mains.train, leaf=7), Orders(layout=Layout(pp=1, dp=1), take=tmp_path))
    assert report.ended == "raised"
    assert "trained with leaf=1, and this script has leaf=7" in report.error


@pytest.mark.parametrize(
    ("leaf", "reduction", "message"),
    [
        (0, "ordered", "leaf must be a number of micro-batches, 1 or more; it is 0"),
        (True, "ordered", "1 or more; it is True"),
        (2.0, "ordered", "1 or more; it is 2.0"),
        (2, "fast", 'leaf=2 is a part of the order of sums, which reduction="fast" leaves to the backend'),
    ],
)
def test_impossible_leaves_are_refused_at_once(leaf: Any, reduction: str, message: str) -> None:
    """Where they are given, whatever the batches are."""

    def main(run: Run) -> None:
        run.shard(mains.Model, blocks="blocks", reduction=reduction, leaf=leaf)

    with pytest.raises(UsageError, match=message):
        run_alone(main, threads=1)


@pytest.mark.parametrize(
    ("changes", "leaf", "message"),
    [
        ((), 2, r"leaf=2 does not divide the 7 micro-batches of a step; leaf=1 or global_batch=16 would"),
        ((), 8, r"leaf=8 does not divide the 7 micro-batches of a step; leaf=7 or global_batch=16 would"),
        (((5, 16),), 7, r"the 8 micro-batches of a step \(from step 5 on\); leaf=1 or global_batch=28 would"),
    ],
)
def test_leaves_that_do_not_divide_every_step_are_refused(changes: Any, leaf: int, message: str) -> None:
    """Before any rank joins, with what would do."""
    order = Order(length=40, global_batch=14, micro_batch=2, seed=1, changes=changes)
    order.check_leaf(1)
    with pytest.raises(ConfigurationError, match=message):
        order.check_leaf(leaf)


def test_the_batches_refuse_the_leaves_of_the_model() -> None:
    """run.batches is where both are known."""

    def main(run: Run) -> None:
        run.shard(mains.Model, blocks="blocks", leaf=2)
        run.batches(mains.Sentences(), global_batch=14, micro_batch=2)

    with pytest.raises(ConfigurationError, match="leaf=2 does not divide the 7 micro-batches"):
        run_alone(main, threads=1)
