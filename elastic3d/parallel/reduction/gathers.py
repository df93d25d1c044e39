"""What a unit's weights are when a rank that has gathered them lets go of them, as one digest for each rank's shard.

They are looked at when they are let go of, rather than when they arrive: what changes in a rank's memory while it
computes with them shows too. An owner digests its shard as it is sent, in the dtype of the computation; since every
rank knows how a unit is cut, shards are compared one by one, which tells whose is wrong.
"""

from __future__ import annotations

from typing import Any

import torch

from elastic3d.health.digest import digest_there
from elastic3d.parallel.reduction.flat import Flat
from elastic3d.parallel.state import local

_APART = 1 << 40
"""Bytes from one parameter's place to the next one's."""


class Gathers:
    """Of one unit. watching: whether weights are looked at, which they are not in most steps."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.watching = False
        self._group = flat.group
        self._seen: list[torch.Tensor] = []
        _before_release(flat.group, self._released)

    def begin(self) -> None:
        """Look at weights from now on."""
        self.watching, self._seen = True, []

    def own(self) -> torch.Tensor:
        """Return the digest of this rank's own shard, as it is sent to others."""
        total = torch.zeros((), dtype=torch.int64, device=self.flat.device)
        for number, parameter in enumerate(self._group.fsdp_params):
            shard = local(parameter.sharded_param).to(parameter.param_dtype or parameter.orig_dtype)
            total += digest_there(shard.contiguous(), number * _APART)
        return total

    def unlike(self, published: torch.Tensor) -> list[int]:
        """Return the shards that were not what their owners have; published: a digest for each of them."""
        if not self._seen:
            return []
        same = (torch.stack(self._seen) == published).all(dim=0).tolist()
        return [shard for shard, one in enumerate(same) if not one]

    def _released(self) -> None:
        if not self.watching:
            return
        totals = torch.zeros(self.flat.rows, dtype=torch.int64, device=self.flat.device)
        for number, parameter in enumerate(self._group.fsdp_params):
            whole, rows = local(parameter.unsharded_param), parameter.padded_sharded_param_size[0]
            for shard, part in enumerate(torch.split(whole, max(1, rows))):
                totals[shard] += digest_there(part, number * _APART)
        self._seen.append(totals)


def _before_release(group: Any, before: Any) -> None:
    """Have `before` called whenever FSDP is about to free a unit's gathered weights."""
    original = group._to_sharded

    def to_sharded() -> None:
        if group.is_unsharded:
            before()
        original()

    group._to_sharded = to_sharded
