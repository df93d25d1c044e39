"""Digests of what ranks of a group send each other in ordered sums, as it leaves and as it arrives.

Each end adds up the digests of all pieces that go from one rank to another, and the sums are compared once, when all
have arrived: 8 bytes for each pair of ranks. To send 8 bytes behind every piece instead would name the exchange as
well, which no decision needs, and would move the pieces from where the additions read them. Pieces are digested at
places of their own, so that none can take another one's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from elastic3d.health.digest import digest_there
from elastic3d.health.phases import Axis
from elastic3d.health.record import fingerprint
from elastic3d.port import Progress

_APART = 1 << 40
"""Bytes from the place of one exchange's pieces to that of the next."""

_COMPARE = 97


class Transit:
    """What one rank sends to each rank of its group, and receives from each, in some exchanges."""

    def __init__(self, ranks: int, device: torch.device) -> None:
        self._sent = torch.zeros(ranks, dtype=torch.int64, device=device)
        self._received = torch.zeros_like(self._sent)
        self._exchanges = 0

    def sends(self, out: torch.Tensor, splits: Sequence[int]) -> int:
        """Take what is about to be sent, splits[i] numbers to rank i; return the number of the exchange."""
        number, self._exchanges = self._exchanges, self._exchanges + 1
        _add(self._sent, out, splits, number)
        return number

    def arrived(self, number: int, pieces: torch.Tensor, splits: Sequence[int]) -> None:
        """Take what has arrived in an exchange, splits[i] numbers of rank i."""
        _add(self._received, pieces, splits, number)

    def unlike(self, group: dist.ProcessGroup, progress: Progress) -> list[int]:
        """Return the ranks of the group of whose pieces some did not arrive as they were sent; a collective of it."""
        said = torch.empty_like(self._sent)
        number = progress.enter(Axis.DP, fingerprint(_COMPARE, said.numel()))
        dist.all_to_all_single(said, self._sent, group=group)
        progress.leave(Axis.DP, number)
        return [rank for rank, same in enumerate((said == self._received).tolist()) if not same]


def _add(totals: torch.Tensor, numbers: torch.Tensor, splits: Sequence[int], exchange: int) -> None:
    at = 0
    for rank, split in enumerate(splits):
        if split:
            totals[rank] += digest_there(numbers[at : at + split], exchange * _APART)
        at += split
