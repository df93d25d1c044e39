"""What one rank comes to in some rounds of a step: a digest for each link of the chain that makes up its gradients.

A micro-batch goes forward through the stages and back again, and each stage leaves the gradients of its units behind.
Two ranks of one place that ran the same micro-batch over the same weights have to come to the same digests. Where they
do not, the first link of the chain that differs tells where it went wrong: all later ones follow from it, on other
stages too. So every link has a place in the chain, and links sort in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from elastic3d.health.digest import digest_of

_MASK = (1 << 64) - 1
_LAST = 1 << 30


class ChainLink(NamedTuple):
    """One link of the chain, in the order of computation. back: 0 on the way forward, 1 on the way back.

    place: how many stages come before it on this way. number: its turn within the stage. name: for people.
    """

    back: int
    place: int
    number: int
    name: str


class Witness:
    """Digests of the links of some turns of one pass. A turn is a leaf: mostly one round, one micro-batch.

    turns: those that are digested. leaf: rounds of a turn. stages: of the whole pipeline. digest: what is said of
    tensors; `all_finite` where only that matters.
    """

    def __init__(
        self,
        turns: Sequence[int],
        *,
        leaf: int = 1,
        stages: int = 1,
        digest: Callable[[Sequence[torch.Tensor]], int] | None = None,
    ) -> None:
        self._digest = digest or _digest
        self._turns, self._leaf, self._stages = frozenset(turns), leaf, stages
        self.said: dict[int, dict[ChainLink, int]] = {turn: {} for turn in turns}

    def output(self, round_: int, stage: int, tensor: torch.Tensor) -> None:
        """Take what a stage made of a micro-batch on the way forward; the last one, its loss."""
        if round_ // self._leaf in self._turns:
            link = ChainLink(0, stage, round_ % self._leaf, f"the output of stage {stage}")
            self.said[round_ // self._leaf][link] = self._digest([tensor])

    def returned(self, round_: int, stage: int, tensor: torch.Tensor) -> None:
        """Take the gradient of a stage's input, which goes back to the stage before it."""
        if round_ // self._leaf in self._turns:
            name = f"the gradient of the input of stage {stage}"
            link = ChainLink(1, self._stages - 1 - stage, _LAST + round_ % self._leaf, name)
            self.said[round_ // self._leaf][link] = self._digest([tensor])

    def gradients(self, turn: int, stage: int, number: int, unit: str, tensors: Sequence[torch.Tensor]) -> None:
        """Take the gradients of one unit, whole and before they are sent. number: of the unit, in backward order."""
        if turn in self._turns:
            self.said[turn][ChainLink(1, self._stages - 1 - stage, number, unit)] = self._digest(tensors)


def all_finite(tensors: Sequence[torch.Tensor]) -> int:
    """Return 1 if all numbers of some tensors are finite, else 0; waits for the device."""
    return int(all(bool(torch.isfinite(tensor.detach()).all()) for tensor in tensors))


def _digest(tensors: Sequence[torch.Tensor]) -> int:
    """Return one digest of several tensors, each beginning at a whole word."""
    total = start = 0
    for tensor in tensors:
        whole = tensor.detach().contiguous()
        total += digest_of(whole, start)
        start += -(-whole.nbytes // 8) * 8
    return total & _MASK
