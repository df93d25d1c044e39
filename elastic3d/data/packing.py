"""Documents of several lengths packed into rows of one length, before anything is cut for ranks.

The rows depend only on (lengths, length, seed): documents are taken in the order of a keyed permutation, each into the
fullest of at most `OPEN` open rows that has room for it (best fit), else into a new row. Rows are then a map-style data
set, shuffled and dealt out like any other, so every document comes once per epoch, together with the same others,
whatever the layout.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from elastic3d.data.dataset_facts import ahead_of, prefetch
from elastic3d.data.permutation import KeyedPermutation
from elastic3d.errors import UsageError

OPEN = 256
IGNORED = -100  # what torch's cross_entropy leaves out unless told otherwise
CHUNK = 1 << 20

Table = NDArray[np.int64]


class TooLong(StrEnum):
    """How to treat a document that is longer than a row."""

    REFUSE = "refuse"
    SPLIT = "split"
    CUT = "cut"


class Packed:
    """Documents as rows of `length` tokens: sample k is (input, target) of row k.

    documents: a map-style data set of 1-D sequences of token numbers. lengths: of each document, in tokens; taken from
    `documents.lengths` if that exists, else found by reading every document once in each process, so give them for more
    than a few thousand. too_long: "refuse", "split" into parts that are packed like documents, or "cut" off whatever is
    beyond `length`, which is counted in `left_out`. seed: of the packing.

    input: int64 of shape (2, length): token numbers, and each token's position in its document, which begins at 0 for
    every document; `document_ids`, `attention_mask` and `cumulative_lengths` are computed from it. With positions=False
    it is only the token numbers, of shape (length,). target: the next token of the same document, and -100, which
    cross_entropy leaves out, at a document's last token and at the fillers of a row, whose tokens are `pad`.
    """

    def __init__(
        self,
        documents: Any,
        *,
        length: int,
        lengths: Sequence[int] | NDArray[Any] | None = None,
        too_long: str = "refuse",
        seed: int = 0,
        pad: int = 0,
        positions: bool = True,
    ) -> None:
        if not isinstance(length, int) or length < 1:
            raise UsageError(f"Packed: length must be the number of tokens of a row, 1 or more; it is {length!r}")
        if too_long not in list(TooLong):
            raise UsageError(f"Packed: too_long must be one of {', '.join(TooLong)}; it is {too_long!r}")
        if not hasattr(documents, "__getitem__") or not hasattr(documents, "__len__"):
            raise UsageError(
                f"Packed needs a map-style data set of documents, with len() and [index]; {type(documents).__name__} "
                "is not one"
            )
        self._documents, self._length, self._pad, self._positions = documents, length, pad, positions
        self._lengths = _lengths(documents, lengths)
        long = np.flatnonzero(self._lengths > length)
        if long.size and too_long == TooLong.REFUSE:
            raise UsageError(
                f"Packed: {long.size} document(s) are longer than a row of {length} tokens, the first of them document "
                f'{int(long[0])} with {int(self._lengths[long[0]])}; choose too_long="split" or "cut", or longer rows'
            )
        self._split = too_long == TooLong.SPLIT
        kept = self._lengths if self._split else np.minimum(self._lengths, length)
        self.left_out = int((self._lengths - kept).sum())
        self._pieces, self._rows = _pack(kept, length, seed)
        if not len(self):
            raise UsageError("Packed: the documents have no tokens at all")

    @property
    def fingerprint(self) -> str:
        """A digest of the documents in each row."""
        return blake3(self._pieces.tobytes() + self._rows.tobytes()).hexdigest()

    @property
    def sample_tokens(self) -> int:
        """Number of tokens of each row, fillers among them: `filled` says how many these are."""
        return self._length

    @property
    def filled(self) -> float:
        """Share of the rows' tokens that belong to a document."""
        return float((self._pieces[:, 2] - self._pieces[:, 1]).sum() / (len(self) * self._length))

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows) - 1

    def row(self, index: int) -> list[tuple[int, int, int]]:
        """Return the contents of a row, in order: (document, first token, token after the last)."""
        first, stop = self._rows[index : index + 2]
        return [(int(document), int(start), int(end)) for document, start, end in self._pieces[first:stop]]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one row as (input, target)."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        tokens = np.full(self._length, self._pad, dtype=np.int64)
        positions = np.zeros(self._length, dtype=np.int64)
        targets = np.full(self._length, IGNORED, dtype=np.int64)
        at = 0
        for document, start, stop in self.row(index):
            words = _words(self._documents[document], document, int(self._lengths[document]))
            size = stop - start
            tokens[at : at + size] = words[start:stop]
            positions[at : at + size] = np.arange(size)
            # The last token of a part has a target too: the next part's first.
            following = words[start + 1 : stop + 1 if self._split else stop]
            targets[at : at + len(following)] = following
            at += size
        inputs = np.stack([tokens, positions]) if self._positions else tokens
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    @property
    def ahead(self) -> int:
        """Of how many rows to know before they are due: each has a document at least of those to be fetched."""
        return ahead_of(self._documents)

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Tell the data set of documents which of them are due next."""
        prefetch(self._documents, [document for number in numbers for document, _, _ in self.row(number)])

    @staticmethod
    def document_ids(positions: torch.Tensor) -> torch.Tensor:
        """Return the number of each token's document in its row, from positions (..., length); each filler is one."""
        return (positions == 0).cumsum(-1) - 1

    @staticmethod
    def attention_mask(positions: torch.Tensor) -> torch.Tensor:
        """Return whether token q may attend to token k, (..., length, length): in one document, and not after q."""
        ids = Packed.document_ids(positions)
        same = ids.unsqueeze(-1) == ids.unsqueeze(-2)
        return same & torch.ones_like(same).tril()

    @staticmethod
    def cumulative_lengths(positions: torch.Tensor) -> torch.Tensor:
        """Return where documents begin in all rows end to end, and the end: int32, for variable-length kernels."""
        flat = positions.reshape(-1)
        begins = torch.nonzero(flat == 0).flatten()
        return torch.cat([begins, begins.new_tensor([flat.numel()])]).to(torch.int32)


def _lengths(documents: Any, given: Any) -> Table:
    known = getattr(documents, "lengths", None) if given is None else given
    if known is None:
        known = [len(_words(documents[number], number, None)) for number in range(len(documents))]
    lengths = np.asarray(known)
    if lengths.ndim != 1 or len(lengths) != len(documents) or (lengths.size and lengths.dtype.kind not in "iu"):
        raise UsageError(
            f"Packed: lengths must be one whole number for each of {len(documents)} documents; they are an array of "
            f"{lengths.dtype} of shape {list(lengths.shape)}"
        )
    if lengths.size and int(lengths.min()) < 0:
        raise UsageError(f"Packed: document {int(lengths.argmin())} was given a length of {int(lengths.min())}")
    return lengths.astype(np.int64)


def _words(document: Any, number: int, length: int | None) -> NDArray[Any]:
    words = np.asarray(document)
    if words.ndim != 1 or (words.size and words.dtype.kind not in "iu"):
        raise UsageError(
            f"Packed: document {number} is an array of {words.dtype} of shape {list(words.shape)}; a document is one "
            "row of whole numbers"
        )
    if length is not None and len(words) != length:
        raise UsageError(
            f"Packed: document {number} has {len(words)} tokens, but its length was given as {length}; what was packed "
            "by wrong lengths would lose tokens"
        )
    return words


def _pack(lengths: Table, length: int, seed: int) -> tuple[Table, Table]:
    """Return pieces (document, start, stop) in order of rows, and where each row begins among them."""
    pieces, rows = array("q"), array("q")
    room: list[tuple[int, int]] = []  # (tokens left, row), least room first
    count = 0
    for document in _shuffled(len(lengths), seed):
        for start in range(0, int(lengths[document]), length):
            stop = min(start + length, int(lengths[document]))
            place = bisect_left(room, (stop - start, -1))
            if place < len(room):
                left, row = room.pop(place)
            else:
                left, row, count = length, count, count + 1
            pieces.extend((document, start, stop))
            rows.append(row)
            if left > stop - start:
                insort(room, (left - (stop - start), row))
                if len(room) > OPEN:
                    room.pop(0)
    row_of = np.array(rows, dtype=np.int64)
    order = np.argsort(row_of, kind="stable")
    begins = np.searchsorted(row_of[order], np.arange(count + 1))
    return np.array(pieces, dtype=np.int64).reshape(-1, 3)[order], begins.astype(np.int64)


def _shuffled(count: int, seed: int) -> Any:
    if count:
        permutation = KeyedPermutation(count, seed, 0)
        for first in range(0, count, CHUNK):
            places = np.arange(first, min(count, first + CHUNK), dtype=np.uint64)
            yield from permutation.of(places).tolist()
