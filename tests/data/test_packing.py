from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic3d import Packed
from elastic3d.data import Batches
from elastic3d.errors import UsageError


class Documents:
    """Document i has so many tokens: i * 100, i * 100 + 1 ..."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        return torch.arange(self.lengths[index]) + index * 100


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=60).filter(any), st.integers(1, 20), st.integers(0, 3))
def test_no_token_is_lost_or_repeated(lengths: list[int], length: int, seed: int) -> None:
    """Split or whole, the rows together are the documents, and no row is longer than allowed."""
    packed = Packed(Documents(lengths), length=length, too_long="split", seed=seed)
    pieces = [piece for index in range(len(packed)) for piece in packed.row(index)]
    tokens = Counter((d, t) for d, start, stop in pieces for t in range(start, stop))
    assert tokens == Counter((d, t) for d, n in enumerate(lengths) for t in range(n))
    for index in range(len(packed)):
        assert 0 < sum(stop - start for _, start, stop in packed.row(index)) <= length


def test_a_row_marks_document_starts_and_valid_targets() -> None:
    """Positions restart at 0 in each document; its last token has no target, and neither has padding."""
    packed = Packed(Documents([3, 2]), length=7, pad=99)
    assert len(packed) == 1
    (tokens, positions), targets = packed[0]
    first, second = (0, 100) if packed.row(0)[0][0] == 0 else (100, 0)
    sizes = [3, 2] if first == 0 else [2, 3]
    assert tokens.tolist() == [*range(first, first + sizes[0]), *range(second, second + sizes[1]), 99, 99]
    assert positions.tolist() == [*range(sizes[0]), *range(sizes[1]), 0, 0]
    expected: list[int] = []
    for begin, size in ((first, sizes[0]), (second, sizes[1])):
        expected += [*range(begin + 1, begin + size), -100]
    assert targets.tolist() == [*expected, -100, -100]
    assert Packed(Documents([3, 2]), length=7, positions=False)[0][0].shape == (7,)
    assert packed.filled == pytest.approx(5 / 7)


def test_a_split_part_has_the_next_token_as_target_and_a_truncated_one_does_not() -> None:
    """Every token but a document's first is a target where it is split; truncated tokens are counted."""
    split = Packed(Documents([10]), length=4, too_long="split")
    targets = sorted(t for index in range(len(split)) for t in split[index][1].tolist() if t >= 0)
    assert targets == list(range(1, 10))
    cut = Packed(Documents([10]), length=4, too_long="cut")
    assert [cut[index][1].tolist() for index in range(len(cut))] == [[1, 2, 3, -100]]
    assert (cut.left_out, split.left_out) == (6, 0)


def test_masks_and_bounds_are_derived_from_positions() -> None:
    """Attention stays within a document and looks back; the bounds suit variable-length kernels."""
    positions = torch.tensor([[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 0, 0]])
    assert Packed.document_ids(positions).tolist() == [[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 1, 2]]
    mask = Packed.attention_mask(positions)
    assert mask.shape == (2, 6, 6)
    assert mask[0, 3].tolist() == [False, False, True, True, False, False]
    assert mask.diagonal(dim1=-2, dim2=-1).all()
    assert Packed.cumulative_lengths(positions).tolist() == [0, 2, 5, 6, 10, 11, 12]


def test_packing_is_a_function_of_lengths_and_seed() -> None:
    """It is the same in every process; another seed packs differently, and little is wasted."""
    lengths = [int(n) for n in np.random.default_rng(1).integers(1, 60, size=2000)]
    one, same, other = (Packed(Documents(lengths), length=64, seed=seed) for seed in (1, 1, 2))
    rows = [[packed.row(index) for index in range(len(packed))] for packed in (one, same, other)]
    assert rows[0] == rows[1] != rows[2]
    assert one.fingerprint == same.fingerprint != other.fingerprint
    assert Batches(one, global_batch=2, micro_batch=2, seed=0).fingerprint == one.fingerprint
    assert one.filled > 0.97


def test_the_packing_is_part_of_the_format() -> None:
    """A recorded row never changes, so that a run restored by a later version goes on as it began."""
    packed = Packed(Documents([5, 3, 2, 7, 1, 4]), length=8, seed=3)
    assert [[piece[0] for piece in packed.row(index)] for index in range(len(packed))] == PINNED


class Unsized(Documents):
    """Documents without lengths, as lists."""

    def __init__(self, lengths: list[int]) -> None:
        self._sizes = lengths

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, index: int) -> Any:
        return list(range(self._sizes[index]))


def test_lengths_are_counted_if_missing_and_checked_if_given() -> None:
    """A wrong length would silently lose tokens."""
    assert Packed(Unsized([3, 2]), length=5).filled == 1.0
    with pytest.raises(UsageError, match="document 1 has 2 tokens, but its length was given as 3"):
        Packed(Unsized([3, 2]), length=6, lengths=[3, 3])[0]
    with pytest.raises(UsageError, match="one whole number for each of 2 documents"):
        Packed(Unsized([3, 2]), length=6, lengths=[3])
    with pytest.raises(UsageError, match="document 1 was given a length of -1"):
        Packed(Unsized([3, 2]), length=6, lengths=[3, -1])


def test_unpackable_documents_are_named() -> None:
    """The first document that is too long, with the options there are, and documents that are invalid."""
    with pytest.raises(UsageError, match=r'1 document\(s\) are longer .* document 1 with 9; choose too_long="split"'):
        Packed(Documents([3, 9]), length=8)
    with pytest.raises(UsageError, match="refuse, split, cut"):
        Packed(Documents([3]), length=8, too_long="drop")
    with pytest.raises(UsageError, match="no tokens at all"):
        Packed(Documents([0, 0]), length=8)
    with pytest.raises(UsageError, match="map-style"):
        Packed(iter([]), length=8)
    with pytest.raises(UsageError, match="document 0 is an array of float"):
        Packed([[0.5, 1.0]], length=8)
    with pytest.raises(UsageError, match="length must be"):
        Packed(Documents([3]), length=0)


PINNED = [[5, 2, 4], [0, 1], [3]]


def test_a_long_fingerprint_is_kept_as_its_digest() -> None:
    """The names of a thousand files are long, and the fingerprint goes into every snapshot."""

    class Many(list[tuple[torch.Tensor, torch.Tensor]]):
        fingerprint = "some-file.bin " * 1000

    pair = (torch.zeros(1), torch.zeros(1))
    kept = Batches(Many([pair, pair]), global_batch=2, micro_batch=1, seed=0).fingerprint
    assert len(kept) == 64
