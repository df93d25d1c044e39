from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic3d.devices import device_at
from elastic3d.health import sheet
from elastic3d.parallel import norms
from elastic3d.parallel.norms import RowSquares, clip_coefficient, fold
from elastic3d.parallel.vote import Ballot, Outcome, Paper

PARAMETERS = [("a", 5), ("b", 3)]


CPU = device_at("cpu", 0)


def row_squares(*gradients: torch.Tensor) -> torch.Tensor:
    return norms.row_squares(gradients, CPU)


def rows(**parts: tuple[int, torch.Tensor]) -> RowSquares:
    """Return the sums of squares of some gradients, each of which begins with a row."""
    return RowSquares(
        places=tuple((name, first, len(part)) for name, (first, part) in parts.items()),
        values=row_squares(*(part for _, part in parts.values())),
    )


def count(ballots: list[Ballot], *, norm: bool = True, micro_batches: int = 3) -> Outcome:
    paper = Paper(world=len(ballots), micro_batches=micro_batches, parameters=PARAMETERS)
    votes = torch.stack([paper.fill(rank, ballot, norm=norm) for rank, ballot in enumerate(ballots)]).sum(0)
    return paper.read(votes, norm=norm)


def test_leaving_needs_all_votes_and_a_checkpoint_one() -> None:
    """Leave and etcd's absence are unanimous, a checkpoint takes one vote, the safe step is the least held."""
    one, other = Ballot(leave=True, etcd_away=True, checkpoint=True, held=7), Ballot(held=5)
    both = count([one, one])
    assert (both.leave, both.etcd_away, both.checkpoint, both.safe_step) == (True, True, True, 7)
    mixed = count([one, other])
    assert (mixed.leave, mixed.etcd_away, mixed.checkpoint, mixed.safe_step) == (False, False, True, 5)
    assert count([other, Ballot()]).safe_step == -1


def test_a_checkpoint_begins_when_every_rank_is_ready() -> None:
    """A due one waits for the slowest writer, so that all ranks write the same steps."""
    due, busy = Ballot(checkpoint=True), Ballot(ready=False)
    assert count([due, Ballot()]).checkpoint
    assert not count([due, busy]).checkpoint
    assert not count([Ballot(), Ballot()]).checkpoint


def test_losses_are_added_in_the_order_of_micro_batches() -> None:
    """Which rank computed a loss does not change their mean, to the last bit."""
    losses = [0.1, 1e16, -1e16]
    alone = count([Ballot(losses=dict(enumerate(losses)))])
    apart = count([Ballot(losses={2: losses[2]}), Ballot(losses={0: losses[0]}), Ballot(losses={1: losses[1]})])
    assert alone.loss == apart.loss == ((0.1 + 1e16) + -1e16) / 3


def test_parameters_without_a_gradient_anywhere_are_absent() -> None:
    """One rank's gradient is enough to be present."""
    outcome = count([Ballot(present=frozenset({"a"})), Ballot()])
    assert outcome.absent == {"b"}


def test_what_ranks_log_comes_out_by_rank() -> None:
    """Only what was logged, in the order of ranks, beside all else that is voted on; one rank tells for all."""
    ballots = [
        Ballot(scalars=(1.5, None, None), losses={0: 3.0}, samples=2),
        Ballot(scalars=(None, 0.0, None), losses={1: 4.0}, held=3, tells=True),
        Ballot(scalars=(-2.5, math.inf, None), losses={2: 5.0}, rows=rows(b=(0, torch.tensor([2.0, 0.0, 0.0])))),
    ]
    paper = Paper(world=3, micro_batches=3, parameters=PARAMETERS, sheets=True, scalars=3)
    votes = torch.stack([paper.fill(rank, ballot, norm=True) for rank, ballot in enumerate(ballots)]).sum(0)
    outcome = paper.read(votes, norm=True)
    assert outcome.scalars == ((1.5, -2.5), (0.0, math.inf), ())
    assert (outcome.loss, outcome.samples, outcome.norm, outcome.tells) == (4.0, 2, 2.0, True)
    assert (count([Ballot(), Ballot()]).scalars, count([Ballot(), Ballot()]).tells) == ((), False)


def test_samples_and_their_sums_add_up() -> None:
    """Counts add, keyed sums add below 2**40."""
    outcome = count([Ballot(samples=3, sample_sum=(1 << 40) - 1), Ballot(samples=4, sample_sum=2)])
    assert (outcome.samples, outcome.sample_sum) == (7, 1)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 5), st.integers(0, 3), st.integers(0, 2**31))
def test_the_norm_does_not_depend_on_the_cuts_of_shards(cut_a: int, cut_b: int, seed: int) -> None:
    """Cutting rows anywhere, over any ranks, leaves every bit of the norm."""
    made = torch.Generator().manual_seed(seed)
    a, b = torch.randn(5, 77, generator=made), torch.randn(3, generator=made)
    alone = count([Ballot(rows=rows(a=(0, a), b=(0, b)))])
    apart = count(
        [
            Ballot(rows=rows(a=(0, a[:cut_a]), b=(cut_b, b[cut_b:]))),
            Ballot(rows=rows(a=(cut_a, a[cut_a:]), b=(0, b[:cut_b]))),
        ]
    )
    assert alone.norm == apart.norm
    expected = math.sqrt(float(a.double().square().sum() + b.double().square().sum()))
    assert alone.norm == pytest.approx(expected, rel=1e-12)


SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.sampled_from([1, 6, 10**6]), st.integers(0, 2**31))
def test_rows_squared_together_have_the_bits_of_rows_alone(shapes: list[list[int]], chunk: int, seed: int) -> None:
    """Gradients of all shapes, empty ones too, in batches of any size."""
    made = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(shape, generator=made) for shape in shapes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norms, "CHUNK", chunk)
        together = row_squares(*gradients)
    alone = [
        float(fold(row.double().square().reshape(1, -1))[0])
        for gradient in gradients
        for row in (gradient if gradient.dim() else gradient.reshape(1))
    ]
    assert together.tolist() == alone


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA device")
def test_a_device_is_waited_for_once() -> None:
    """However many gradients and losses there are to be read, nothing waits but the reading's own end."""
    gradients = [torch.randn(size, 7, device="cuda") for size in range(1, 40)]
    device = device_at("cuda", 0)
    device.open()
    rows = norms.row_squares(gradients, device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        squares = norms.row_squares(gradients, device)
        read = device.begin_reading([squares, *(gradient.sum() for gradient in gradients)]).wait()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert read[0].tolist() == rows.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("length", [1, 3, 16, 48, 1024, 5120, 8192, 11008])
def test_a_gpus_sums_of_squares_have_the_hosts_bits(length: int, dtype: torch.dtype) -> None:
    """By its kernel, for widths that are powers of two, multiples of one, and what it leaves to the fold."""
    device = device_at("cuda", 0)
    device.open()
    gradients = [torch.randn(number, length).to(dtype) for number in (3, 1, 70)]
    there = norms.row_squares([gradient.cuda() for gradient in gradients], device)
    assert torch.equal(there.cpu(), row_squares(*gradients))


def test_non_finite_values_are_reported_and_not_raised() -> None:
    """A NaN in one row or one loss reaches the outcome."""
    bad = count([Ballot(rows=rows(a=(0, torch.tensor([[1.0], [math.nan]]))))])
    assert math.isnan(bad.norm or 0.0)
    assert not bad.finite
    assert not count([Ballot(losses={0: math.inf})]).finite
    assert count([Ballot()]).finite
    assert math.isnan(clip_coefficient(math.nan, 1.0))


def test_without_clipping_no_rows_are_voted_on() -> None:
    """The vote is short then, and there is no norm."""
    assert count([Ballot()], norm=False).norm is None


def test_rows_of_every_shape_are_squared() -> None:
    """Scalars, vectors, empty shards and wide tensors have one number per row."""
    assert row_squares(torch.tensor(3.0)).tolist() == [9.0]
    assert row_squares(torch.tensor([1.0, 2.0])).tolist() == [1.0, 4.0]
    assert row_squares(torch.zeros(0, 4)).tolist() == []
    assert row_squares(torch.ones(2, 3, 5)).tolist() == [15.0, 15.0]
    given_ = torch.ones(2, 3, dtype=torch.float64)
    row_squares(given_ * 1.0)
    assert torch.equal(given_, torch.ones(2, 3, dtype=torch.float64))
    assert fold(torch.zeros(2, 0)).tolist() == [0.0, 0.0]


def test_clipping_lowers_a_norm_and_never_raises_it() -> None:
    """The factor is one below the limit."""
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(4.0, 1.0) == pytest.approx(0.25, rel=1e-5)


def test_the_rows_of_all_ranks_ride_in_eight_votes() -> None:
    """Each rank's in one of them, unchanged, in votes of one size; none where steps are not measured."""
    world, width = 11, sheet.WIDTH
    rows = [tuple(0.1 * rank + place for place in range(width)) for rank in range(world)]
    heard: dict[int, tuple[float, ...]] = {}
    paper = Paper(world=world, micro_batches=2, parameters=PARAMETERS, sheets=True)
    for step in range(17, 17 + sheet.EVERY):
        votes = [paper.fill(rank, Ballot(row=rows[rank], held=3), norm=True, step=step) for rank in range(world)]
        outcome = paper.read(torch.stack(votes).sum(0), norm=True, step=step)
        assert outcome.safe_step == 3
        heard |= dict(zip(sheet.speakers(step, world), outcome.sheets, strict=True))
    assert [heard[rank] for rank in range(world)] == rows
    assert count([Ballot(row=rows[0]), Ballot()]).sheets == ()
