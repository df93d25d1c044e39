"""The outer optimizer is torch's, and its bits do not depend on how parameters are cut."""

from __future__ import annotations

import torch

from elastic3d.islands.outer import add_up, outer_step


def test_it_is_torchs_sgd_with_nesterov_momentum() -> None:
    """As DiLoCo takes it, over the mean of the deltas."""
    torch.manual_seed(1)
    mine = torch.randn(1000)
    momentum = torch.zeros(1000)
    theirs = torch.nn.Parameter(mine.clone())
    optimizer = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(5):
        deltas = [torch.randn(1000) for _ in range(3)]
        theirs.grad = torch.stack(deltas).mean(0)
        optimizer.step()
        total = None
        for delta in deltas:
            total = add_up(total, delta)
        assert total is not None
        outer_step(mine, momentum, total, 3, lr=0.7, mu=0.9)
    assert torch.allclose(mine, theirs.detach(), atol=1e-5)


def test_the_mean_of_parameters_is_lr_1_without_momentum() -> None:
    """Local SGD."""
    anchor, islands = torch.tensor([4.0, 8.0]), [torch.tensor([2.0, 8.0]), torch.tensor([6.0, 4.0])]
    total = None
    for island in islands:
        total = add_up(total, anchor - island)
    assert total is not None
    outer_step(anchor, None, total, 2, lr=1.0, mu=0.0)
    assert anchor.tolist() == [4.0, 6.0]


def test_bits_do_not_depend_on_the_cut() -> None:
    """Odd pieces at odd places have the bits of the whole, where vectors and their rests are computed by other code."""
    torch.manual_seed(2)
    whole, momentum, total = torch.randn(4099), torch.randn(4099), torch.randn(4099)
    room = torch.empty(4200)
    parts = []
    for start, stop in ((0, 1), (1, 1030), (1030, 4099)):
        piece = room[3 : 3 + stop - start]
        piece.copy_(whole[start:stop])
        moved = momentum[start:stop].clone()
        outer_step(piece, moved, total[start:stop].clone(), 3, lr=0.7, mu=0.9)
        parts.append((piece.clone(), moved))
    outer_step(whole, momentum, total, 3, lr=0.7, mu=0.9)
    assert torch.equal(whole, torch.cat([part for part, _ in parts]))
    assert torch.equal(momentum, torch.cat([moved for _, moved in parts]))


def test_the_sum_does_not_overwrite_a_delta() -> None:
    """The island's own is still written to the store."""
    delta = torch.ones(3)
    add_up(add_up(None, delta), torch.ones(3))
    assert delta.tolist() == [1, 1, 1]
