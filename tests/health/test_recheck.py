"""A piece of an update comes to the bits that it has in the whole, and a wrong bit anywhere in it shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import optim
from torch.nn import Parameter

from elastic3d.health import recheck
from elastic3d.health.recheck import EVERY, HEADER, CannotRepeat, cut, digests_after, pack, proved, recomputed, unpack

CPU = torch.device("cpu")
MAKES: dict[str, Callable[[list[Parameter]], optim.Optimizer]] = {
    "AdamW": lambda p: optim.AdamW(p, lr=1e-2),
    "Adam, amsgrad": lambda p: optim.Adam(p, amsgrad=True, weight_decay=0.1),
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: optim.Adagrad(p),
    "RMSprop": lambda p: optim.RMSprop(p, centered=True, momentum=0.5),
    "NAdam": lambda p: optim.NAdam(p),
    "RAdam": lambda p: optim.RAdam(p),
    "Adamax": lambda p: optim.Adamax(p),
    "Adadelta": lambda p: optim.Adadelta(p),
    "ASGD": lambda p: optim.ASGD(p),
    "Rprop": lambda p: optim.Rprop(p),
}


def trained(make: Callable[[list[Parameter]], optim.Optimizer], steps: int = 2) -> tuple[Any, Parameter]:
    torch.manual_seed(1)
    parameter = Parameter(torch.randn(37, 29))
    optimizer = make([parameter])
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    for _ in range(steps):
        parameter.grad = torch.randn(37, 29)
        optimizer.step()
        schedule.step()
    parameter.grad = torch.randn(37, 29)
    return optimizer, parameter


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_piece_comes_to_the_bits_of_the_whole(name: str, steps: int) -> None:
    """Sent to another rank, whose optimizer is the same and has made none of these steps; its own stays as it is."""
    optimizer, parameter = trained(MAKES[name], steps)
    piece = cut(optimizer, 0, parameter, 104, 747)
    assert piece is not None
    optimizer.step()
    room = pack(piece, digests_after(optimizer, parameter, 104, 747), HEADER + (1 << 16))
    other = MAKES[name]([Parameter(torch.zeros(3))])
    proved(other, CPU)
    received = unpack(room, CPU)
    assert received is not None
    assert recomputed(other, received[0]) == received[1]
    assert all(not state["step"] for state in other.state.values())


@given(bit=st.integers(0, 31), at=st.integers(0, 642), which=st.sampled_from(["parameter", "exp_avg", "exp_avg_sq"]))
@settings(max_examples=40, deadline=None)
def test_a_flipped_bit_of_the_update_shows(bit: int, at: int, which: str) -> None:
    optimizer, parameter = trained(MAKES["AdamW"])
    piece = cut(optimizer, 0, parameter, 104, 747)
    assert piece is not None
    optimizer.step()
    target = parameter.data if which == "parameter" else optimizer.state[parameter][which]
    target.view(-1).view(torch.int32)[104 + at] ^= (1 << bit) if bit < 31 else -(1 << 31)
    assert recomputed(optimizer, piece) != digests_after(optimizer, parameter, 104, 747)


def test_nothing_sent_is_nothing() -> None:
    assert unpack(torch.zeros(HEADER, dtype=torch.uint8), CPU) is None


class Own(optim.AdamW):
    """An optimizer of which nothing is known."""


def test_what_cannot_be_cut_is_refused() -> None:
    """With why, for people."""
    with pytest.raises(CannotRepeat, match="Own may compute"):
        proved(Own([Parameter(torch.zeros(3))]), CPU)
    with pytest.raises(CannotRepeat, match="no plain numbers"):
        proved(optim.AdamW([Parameter(torch.zeros(3))], lr=torch.tensor(0.1)), CPU)


def test_one_step_in_so_many_has_its_turn_and_partners_are_on_other_nodes() -> None:
    shifts = recheck.shifts_of(["a", "a", "b", "b"], ["cpu"] * 4)
    assert shifts == (2,)
    steps = [step for step in range(10 * EVERY) if recheck.shift_at(step, shifts, seed=3) is not None]
    assert [step // EVERY for step in steps] == list(range(10))
    assert recheck.shifts_of(["a", "b"], ["cpu", "gpu"]) == ()
    assert recheck.shifts_of(["a"], ["cpu"]) == ()
    assert recheck.shifts_of(["a", "a"], ["cpu", "cpu"]) == ()


@pytest.mark.parametrize("name", ["AdamW", "Adam, amsgrad", "SGD"])
def test_a_full_piece_fits_into_what_is_sent(name: str) -> None:
    """With the numbers of its state, of whatever size the parameter is."""
    parameter = Parameter(torch.randn(1 << 19))
    optimizer = MAKES[name]([parameter])
    parameter.grad = torch.randn(1 << 19)
    optimizer.step()
    numbers = recheck.numbers_in(optimizer)
    piece = cut(optimizer, 0, parameter, 0, numbers)
    assert piece is not None
    room = pack(piece, digests_after(optimizer, parameter, 0, numbers), HEADER + recheck.BYTES)
    received = unpack(room, CPU)
    assert received is not None
    assert torch.equal(received[0].gradient, parameter.grad[:numbers])
    assert sum(one.nbytes for one in piece.tensors) > 0.99 * recheck.BYTES


def test_what_a_script_adds_to_a_step_is_not_held_against_the_device() -> None:
    """Its hooks may change what the step makes, and so may a method that it puts in the step's place."""
    optimizer, parameter = trained(MAKES["AdamW"])
    hook = optimizer.register_step_pre_hook(lambda *given: None)
    assert cut(optimizer, 0, parameter, 0, 64) is None
    hook.remove()
    assert cut(optimizer, 0, parameter, 0, 64) is not None
    optimizer.step = lambda: None
    assert cut(optimizer, 0, parameter, 0, 64) is None
    parameter.grad = parameter.detach().to_sparse()
    assert cut(MAKES["SGD"]([parameter]), 0, parameter, 0, 64) is None
