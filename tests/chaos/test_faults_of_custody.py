"""What no audit of passes repeats goes wrong as the script's faults say: where it is asked for, and once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.optim import adam

from chaos.scripts.injectors.custody import gathered
from chaos.scripts.injectors.fault import NEWCOMER, Fault
from chaos.scripts.injectors.kinds import KINDS, parse
from elastic3d.devices import cpu
from elastic3d.devices.cpu import CpuDevice
from elastic3d.parallel.mesh import Mesh
from elastic3d.values import Layout


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Undo what a fault leaves in the place of what computes rightly."""
    before = (Mesh.begin_sum, adam.adam, dist.all_to_all_single, cpu.add_rows)
    yield
    Mesh.begin_sum, adam.adam, dist.all_to_all_single, cpu.add_rows = before  # type: ignore[method-assign]


def due(kind: str, out: Path, optimizer: torch.optim.Optimizer | None = None) -> Fault:
    """Return a fault that happens now."""
    fault = parse(f"{kind}:0@5", out)
    fault.optimizer = optimizer
    fault.begin(0, 5)
    fault.forward()
    return fault


def test_a_vote_is_heard_otherwise_once(tmp_path: Path) -> None:
    """In its last number, of which the gradient's norm is made; the next one is heard as it was."""
    mesh = Mesh(Layout(pp=1, dp=1), 0, CpuDevice())
    due("vote", tmp_path)
    heard = [mesh.begin_sum(torch.tensor([1.0, 2.0], dtype=torch.float64))().tolist() for _ in range(2)]
    assert heard == [[1.0, 3.0], [1.0, 2.0]]


def test_a_whole_update_is_wrong_once_and_nothing_that_is_computed_again(tmp_path: Path) -> None:
    """Every number of it in one bit, so that whichever piece is computed again shows it."""
    wrong, right = (torch.nn.Parameter(torch.linspace(-1.0, 1.0, 7)) for _ in range(2))
    optimizers = [torch.optim.AdamW([one], lr=0.1) for one in (wrong, right)]
    due("update", tmp_path, optimizers[0])
    for parameter, optimizer in zip((right, wrong), reversed(optimizers), strict=True):
        parameter.grad = torch.ones(7)
        optimizer.step()
    assert (wrong.data.view(torch.int32) ^ right.data.view(torch.int32)).tolist() == [1 << 12] * 7
    wrong.data.copy_(right.data)
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(wrong, right)


def test_all_updates_are_wrong_from_then_on(tmp_path: Path) -> None:
    """Those of others' pieces too: whoever computes wrongly does so whatever it is asked for."""

    def updated() -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 5))
        parameter.grad = torch.ones(5)
        torch.optim.AdamW([parameter]).step()
        return parameter.data.view(torch.int32)

    right = updated()
    due("updates", tmp_path)
    assert [(updated() ^ right).tolist() for _ in range(2)] == [[1 << 12] * 5] * 2


def test_each_sum_is_wrong_once_and_none_that_is_added_up_again(tmp_path: Path) -> None:
    """What another rank asks this one to add begins a sum; and a step that is made again is right."""
    # A sum keeps the method from when it was made.
    add, rows = CpuDevice().add_rows, torch.ones(2, 3)
    totals = [torch.zeros(3), torch.zeros(3)]
    due("fold", tmp_path)

    def added() -> list[list[float]]:
        for total in totals:
            add(total, rows, True)
            add(total, rows, False)
        return [total.tolist() for total in totals]

    first = added()
    assert [one[1:] for one in first] == [[4.0, 4.0]] * 2
    assert all(one[0] != 4.0 for one in first)
    assert added() == [[4.0] * 3] * 2
    again = torch.zeros(3)
    add(again, torch.ones(4, 3), True)
    assert again.tolist() == [4.0] * 3


@pytest.mark.parametrize(("rank", "at"), [(0, 7), (1, 0), (3, 0)])
def test_a_gathered_weight_is_wrong_in_what_another_rank_owns(rank: int, at: int) -> None:
    """Past torch's count of writes, as memory does it."""
    weight = torch.nn.Parameter(torch.ones(4, 2))
    version = weight._version
    gathered(weight, rank)
    assert torch.nonzero(weight.flatten() != 1.0).flatten().tolist() == [at]
    assert weight._version == version


def test_a_newcomer_is_one_that_comes_later_and_it_errs_from_its_first_step_on(tmp_path: Path) -> None:
    """Not those with whom the job begins, nor those who were there, nor one that came before."""

    def errs(first: int, *, newcomer: bool) -> bool:
        fault = parse("sticky:newcomer@8", tmp_path)
        assert fault.of == NEWCOMER
        fault.newcomer = newcomer
        fault.begin(1, first)
        return fault._due()

    assert [errs(first, newcomer=True) for first in (0, 7, 8, 11)] == [False, False, True, True]
    assert not errs(11, newcomer=False)
    later = copy.copy(parse("sticky:newcomer@8", tmp_path))
    later.newcomer = True
    later.begin(1, 7)
    later.begin(1, 8)
    assert not later._due()


@pytest.mark.gloo
def test_one_piece_arrives_otherwise_once(tmp_path: Path) -> None:
    """From the next rank of the group, here itself; what has no pieces of its own in it is let pass."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        due("wire", tmp_path)
        group, said = dist.group.WORLD, torch.zeros(4, dtype=torch.uint8)

        def arrived() -> list[int]:
            into = torch.empty_like(said)
            dist.all_to_all_single(into, said, [4], [4], group=group, async_op=True).wait()
            return into.tolist()

        number, other = torch.zeros(1, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
        dist.all_to_all_single(other, number, group=group)
        assert other.tolist() == [0]
        assert [arrived(), arrived()] == [[0, 1 << 4, 0, 0], [0, 0, 0, 0]]
    finally:
        dist.destroy_process_group()


def test_every_kind_has_a_line_in_the_script() -> None:
    """So that whoever asks for help finds it."""
    from chaos.scripts import train_faulty

    said = [line.split()[0] for line in (train_faulty.__doc__ or "").splitlines() if line.startswith("    ")]
    assert set(KINDS) == set(said[1:])
