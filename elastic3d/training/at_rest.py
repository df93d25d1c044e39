"""Bits of this rank's state that change though nobody writes to them: a part of it is looked at in each step.

Parameters and the optimizer's state are written to by updates alone. So where the passes begin a part of them is copied
beside, as large as its share of the time allows, and compared before the vote (`health/custody`), so that where bits
have changed nobody makes the step: others may have computed with them. What the script writes itself shows in torch's
count of writes to a tensor, or in more words than memory loses at once.

Costs at most `Assignment.at_rest` of the time, over all steps, and 64 MiB on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from elastic3d.clock import Clock
from elastic3d.data.permutation import key
from elastic3d.health import custody
from elastic3d.health.custody import LookBudget, Rotation, Stretch
from elastic3d.parallel.state import local
from elastic3d.port import Audited, AuditReport, Port
from elastic3d.training.findings import end


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beside:
    """A part of one tensor as it was. version: torch's count of operations that wrote to it."""

    name: str
    tensor: torch.Tensor
    version: int
    stretch: Stretch
    copy: torch.Tensor

    @property
    def live(self) -> torch.Tensor:
        """The same bytes as they are now."""
        return _bytes(self.tensor)[self.stretch.start : self.stretch.stop]


class AtRest:
    """Looks at parameters and the optimizer's state, of which it holds none but what is copied beside."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, port: Port, clock: Clock, seed: int) -> None:
        self._optimizer, self._port, self._clock = optimizer, port, clock
        self._named = [(name, parameter) for name, parameter in model.named_parameters()]
        self._budget = LookBudget(port.assignment.at_rest)
        self._seed = seed
        self._rotation: Rotation | None = None
        self._tensors: list[tuple[str, Callable[[], torch.Tensor | None]]] = []
        self._sizes: list[int] = []
        self._room = torch.empty(0, dtype=torch.uint8)
        self._beside: list[_Beside] = []
        self._spent = 0.0
        self._since = clock.monotonic()
        self._states = -1
        self._off = False

    def copy(self) -> None:
        """Copy the next part beside."""
        self._beside = []
        nbytes = 0 if self._off else self._budget.nbytes()
        if not nbytes:
            return
        begun = self._clock.monotonic()
        if self._rotation is None or len(self._optimizer.state) != self._states:
            self._rotation = self._begin()
        stretches = self._rotation.take(nbytes)
        at = 0
        for stretch in stretches:
            name, find = self._tensors[stretch.index]
            tensor = find()
            if tensor is None or tensor.nbytes != self._sizes[stretch.index]:
                self._rotation = None  # the optimizer has made its state anew
                continue
            size = stretch.stop - stretch.start
            if self._room.numel() < at + size or self._room.device != tensor.device:
                room = max(nbytes, size) + custody.GRAIN * len(stretches)
                self._room = torch.empty(room, dtype=torch.uint8, device=tensor.device)
                at = 0
            copy = self._room[at : at + size]
            copy.copy_(_bytes(tensor)[stretch.start : stretch.stop])
            at += -(-size // custody.GRAIN) * custody.GRAIN
            self._beside.append(_Beside(name=name, tensor=tensor, version=tensor._version, stretch=stretch, copy=copy))
        self._spent = self._clock.monotonic() - begun

    def compare(self, step: int) -> None:
        """Compare what was copied with what is there; Convicted where few words have changed, by no operation."""
        now = self._clock.monotonic()
        self._budget.stepped(now - self._since)
        self._since = now
        beside, self._beside = self._beside, []
        if not beside:
            return
        begun = self._clock.monotonic()
        unlike = [one for one in beside if one.tensor._version == one.version and not _same(one.live, one.copy)]
        if unlike:
            self._differ(unlike, step)
        nbytes = sum(one.stretch.stop - one.stretch.start for one in beside)
        self._budget.spent(self._spent + self._clock.monotonic() - begun, nbytes)

    def _differ(self, unlike: list[_Beside], step: int) -> None:
        one, assignment = unlike[0], self._port.assignment
        changed = [_changed(one) for one in unlike]
        if custody.written(changed):
            self._off = True
            detail = (
                f"{one.name!r} of rank {assignment.rank} changed between its passes' beginning and its update, and not "
                "as memory changes: the script writes to it itself. State at rest is not looked at any more in this "
                "generation; write to parameters and the optimizer's state between steps only"
            )
            mine = (assignment.rank,)
            self._port.audited(AuditReport(kind=Audited.UNCHECKED, where="state at rest", ranks=mine, detail=detail))
            return
        at = int(torch.nonzero(one.live != one.copy)[0])
        bits = sum(changed[0].values())
        self._port.finish_copy()
        third = self._port.copied(step, one.name, one.stretch.start + at)
        agrees = third is not None and third == int(one.copy[at])
        witness = (
            "the snapshot has what the copy has"
            if agrees
            else "there is no snapshot of this step"
            if third is None
            else "the snapshot has what is there now, or something else"
        )
        report = AuditReport(
            kind=Audited.ALTERED,
            step=step,
            where=one.name,
            ranks=(assignment.rank,),
            nodes=(assignment.node,),
            detail=(
                f"{bits} bit{'s' * (bits != 1)} of {one.name!r} changed at rest in the memory of rank "
                f"{assignment.rank}, from byte {one.stretch.start + at} of what it holds on, though nothing wrote to "
                f"it: {witness}"
            ),
        )
        end(self._port, report, certain=True)

    def _begin(self) -> Rotation:
        """Find all there is to look at, and begin at a place of this rank's own."""
        self._tensors, self._sizes = [], []
        self._states = len(self._optimizer.state)

        def add(name: str, find: Callable[[], torch.Tensor | None]) -> None:
            tensor = find()
            if tensor is not None and tensor.is_contiguous() and tensor.dim() and tensor.nbytes:
                self._tensors.append((name, find))
                self._sizes.append(tensor.nbytes)

        for name, parameter in self._named:
            add(f"model/{name}", _finder(parameter))
            for held in sorted(self._optimizer.state.get(parameter, {})):
                add(f"optimizer/{name}/{held}", _state_finder(self._optimizer, parameter, held))
        at = int(key("at rest", self._seed, self._port.assignment.rank, self._port.assignment.generation) % (1 << 48))
        return Rotation(self._sizes, at)


def _finder(parameter: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    return lambda: local(parameter)


def _state_finder(optimizer: Optimizer, parameter: torch.Tensor, name: str) -> Callable[[], torch.Tensor | None]:
    def find() -> torch.Tensor | None:
        value = optimizer.state.get(parameter, {}).get(name)
        return local(value) if isinstance(value, torch.Tensor) else None

    return find


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _same(live: torch.Tensor, copy: torch.Tensor) -> bool:
    """Return whether bytes are the same; by words where they lie so, which takes a sixth of the time."""
    whole = live.numel() // 8 * 8
    if live.storage_offset() % 8 or copy.storage_offset() % 8:
        return torch.equal(live, copy)
    same = torch.equal(live[:whole].view(torch.int64), copy[:whole].view(torch.int64))
    return same and torch.equal(live[whole:], copy[whole:])


def _changed(one: _Beside) -> dict[int, int]:
    """Return how many bits of each word have changed; of no more words than it takes to know that code wrote them."""
    bits: dict[int, int] = {}
    unlike = torch.bitwise_xor(one.live, one.copy)
    for at in torch.nonzero(unlike).reshape(-1)[: 8 * custody.FEW + 8].tolist():
        word = (one.stretch.start + at) // 8
        bits[word] = bits.get(word, 0) + int(unlike[at]).bit_count()
    return bits
