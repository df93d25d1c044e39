"""What is kept and digested of an exchange is enough to see a single changed bit, and to add a sum up again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic3d.devices.cpu import add_rows
from elastic3d.parallel.reduction.fold_sample import FoldSample, width_of
from elastic3d.parallel.reduction.transit import Transit

CPU = torch.device("cpu")


def exchanged(splits: list[list[int]], rounds: int, spoil: tuple[int, int, int] | None = None) -> list[list[bool]]:
    """Exchange pieces among ranks; return for each receiver of whom all arrived as it was sent.

    splits: by sender and receiver. spoil: (round, sender, receiver) of a piece of which a bit changes.
    """
    ranks = len(splits)
    ends = [Transit(ranks, CPU) for _ in range(ranks)]
    for round_ in range(rounds):
        draw = torch.Generator().manual_seed(round_)
        sent = [torch.randn(sum(row), generator=draw) for row in splits]
        numbers = [end.sends(out, row) for end, out, row in zip(ends, sent, splits, strict=True)]
        pieces = [out.split(row) for out, row in zip(sent, splits, strict=True)]
        for receiver, end in enumerate(ends):
            arrived = [pieces[sender][receiver].clone() for sender in range(ranks)]
            for sender, piece in enumerate(arrived):
                if spoil == (round_, sender, receiver) and piece.numel():
                    piece.view(torch.int32)[-1] ^= 1
            end.arrived(numbers[receiver], torch.cat(arrived), [len(piece) for piece in arrived])
    return [[bool(ends[s]._sent[r] == ends[r]._received[s]) for s in range(ranks)] for r in range(ranks)]


@given(
    splits=st.integers(1, 4).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 9), min_size=n, max_size=n), min_size=n, max_size=n)
    ),
    rounds=st.integers(1, 3),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_one_bit_of_one_piece_shows_at_its_pair_alone(
    splits: list[list[int]], rounds: int, data: st.DataObject
) -> None:
    """However unequal pieces are; and where nothing changed, nothing shows."""
    ranks = len(splits)
    assert all(map(all, exchanged(splits, rounds)))
    at = data.draw(st.tuples(st.integers(0, rounds - 1), st.integers(0, ranks - 1), st.integers(0, ranks - 1)))
    _, sender, receiver = at
    seen = exchanged(splits, rounds, at)
    unlike = [(s, r) for r in range(ranks) for s in range(ranks) if not seen[r][s]]
    assert unlike == ([(sender, receiver)] if splits[sender][receiver] else [])


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_what_is_kept_adds_up_to_the_part_of_the_sum(wire: torch.dtype) -> None:
    """Bit for bit, whatever part is drawn; over all draws every number has its turn, and the bound is kept."""
    parts, rounds, ranks = [(0, 700), (700, 0), (700, 333)], 3, 4
    pieces = torch.randn(rounds, ranks, 1033).to(wire)
    total, covered = torch.empty(1033), torch.zeros(1033, dtype=torch.bool)
    most = 12 * 128 * wire.itemsize
    for draw in range(40):
        sample = FoldSample(draw=draw, most=most)
        for round_ in range(rounds):
            for at, size in parts:
                rows = pieces[round_, :, at : at + size]
                sample.added(parts, at, rows, rounds * ranks)
                add_rows(total[at : at + size], rows, round_ == 0)
        kept = sample.pieces
        assert kept is not None
        assert kept.nbytes <= most
        again = torch.empty(kept.shape[1])
        add_rows(again, kept, True)
        assert torch.equal(again, sample.part_of(total))
        covered |= torch.isin(total, sample.part_of(total))
    assert covered.all()


def test_what_has_nothing_to_add_keeps_nothing() -> None:
    """A rank may own no number of a small unit; and pieces may be too many for the bound."""
    for parts, most in (([(0, 0)], 1 << 20), ([(0, 8)], 8)):
        sample = FoldSample(draw=5, most=most)
        sample.added(parts, 0, torch.zeros(4, parts[0][1]), 4)
        assert sample.pieces is None
    assert width_of(1 << 20, 4, 1 << 20) == 0
