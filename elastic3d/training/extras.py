"""What a script has kept beside model, optimizer, schedule and data: objects with `state_dict` and `load_state_dict`.

Their tensors are tiles of every snapshot and checkpoint, under `extra/<name>/...`, cut like those of the model where
they are distributed tensors; their other values are facts (`parallel.extra_tree`). What is no distributed tensor is
kept once for all ranks that have it, and has to be the same on them. It is compared when the run begins, all of it; and
from then on in each vote, by a number for what went into the last snapshot.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from blake3 import blake3
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from checkpointing.format.tiles import TensorSpec, digest
from checkpointing.interchange.tensors import buffer_of
from elastic3d.errors import StateUnfit, UsageError
from elastic3d.parallel import extra_tree as tree
from elastic3d.parallel.averaging import average_on_shards
from elastic3d.parallel.mesh import Mesh
from elastic3d.parallel.peer_errors import is_lost_peer
from elastic3d.parallel.state import TensorInMemory, Tile, box_of, is_copy, local, sharded_like, specification
from elastic3d.training.state_facts import KeptExtra

ACCEPT = "extra"
"""What `run.restore(accept=)` says where an object is not the saved one any more."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")
_BITS = 26
_BOX = "\n"
"""Between a tensor's key and which part of it is meant; no key has it."""


class Extras:
    """The objects that `run.restore(extra=)` was given, by name. Falsy if there are none.

    UsageError, with its name, for one that is kept already, cannot be kept, or is no such object. kept: what is kept
    anyway. parameters: of the model, whose optimizers are not numbered alike on all ranks.
    """

    def __init__(
        self, given: Mapping[str, Any] | None, *, kept: Iterable[object] = (), parameters: Iterable[torch.Tensor] = ()
    ) -> None:
        self._objects: dict[str, Any] = dict(given or {})
        owned, own = {id(one) for one in kept if one is not None}, {id(parameter) for parameter in parameters}
        for name, one in self._objects.items():
            _check(name, one, owned, own)
            if isinstance(one, AveragedModel):
                average_on_shards(one, name)
        states = self._states()
        try:
            _apart(states)
        except StateUnfit as error:
            raise UsageError(f"run.restore: {error}") from error
        self._anew = frozenset(_classes(states))
        self._mesh: Mesh | None = None
        self._before: frozenset[str] = frozenset()
        self._everywhere: frozenset[str] = frozenset()
        self._elsewhere: frozenset[str] = frozenset()
        self._of_stage: frozenset[str] = frozenset()
        self._rooms: dict[str, TensorInMemory] = {}
        self._said: dict[str, str] = {}
        self.number = 0.0

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._objects)

    def meet(self, mesh: Mesh) -> None:
        """Learn which tensors the ranks have before anything is loaded; UsageError for other objects; a collective."""
        self._mesh = mesh
        mine, names = self._tensors(), sorted(self._objects)
        self._before = frozenset(mine)
        said = [json.loads(data) for data in mesh.gather(json.dumps([names, sorted(mine)]).encode())]
        for rank, (others, _) in enumerate(said):
            if others != said[0][0]:
                raise UsageError(
                    f"run.restore: extra= has {said[0][0]} on rank 0, and {others} on rank {rank}: give the same on "
                    "every rank"
                )
        rows = [frozenset(keys) for _, keys in said]
        width = mesh.layout.stage_ranks
        stage = rows[mesh.place.pp * width : (mesh.place.pp + 1) * width]
        self._everywhere = frozenset.intersection(*rows)
        self._elsewhere = frozenset().union(*rows) - self._before
        self._of_stage = frozenset.intersection(*stage) - self._everywhere

    def changes(self, saved: Mapping[str, KeptExtra], accept: Collection[str] = ()) -> list[str]:
        """Return in words what begins as it is; StateUnfit for what is no longer there, or another one."""
        for name, then in saved.items():
            if self._other(name, then) and ACCEPT not in accept:
                here = kind_of(self._objects[name]) if name in self._objects else "not given to run.restore any more"
                raise StateUnfit(
                    f"the saved state has extra={name!r}, of the class {then.kind}, and here it is {here}. Trying "
                    f"again does not help: go back to it, or, where it changed on purpose, say so: run.restore(..., "
                    f"accept={ACCEPT!r})"
                )
        return [
            f"extra={name!r} is not in the saved state, and begins as it is"
            for name in self._objects
            if name not in saved
        ]

    def accepted(self, saved: Mapping[str, KeptExtra]) -> list[str]:
        """Return in words what is only so because the script asks for it."""
        return [
            f"extra={name!r} was {then.kind} and is {kind_of(self._objects[name])} from here on, and begins as it is"
            if name in self._objects
            else f"extra={name!r} is kept no more from here on"
            for name, then in saved.items()
            if self._other(name, then)
        ]

    def brought(self, kept: Mapping[str, KeptExtra]) -> list[torch.Tensor]:
        """Return the tensors of the objects whose state a saved one has."""
        return [
            tensor
            for name, apart in self._apart().items()
            if name in kept and not self._other(name, kept[name])
            for tensor in apart.tensors.values()
        ]

    def rooms(self, saved: Mapping[str, TensorSpec], kept: Mapping[str, KeptExtra]) -> list[TensorInMemory]:
        """Return memory for what this rank needs of a saved state; StateUnfit where it does not fit.

        Cut as the object has it. A tensor that no rank has before its first use is whole on every rank.
        """
        here = self._tensors() if self._objects else {}
        self._rooms = {}
        for key, spec in saved.items():
            name = tree.name_of(key)
            loads = name in self._objects and name in kept and not self._other(name, kept[name])
            if not loads or (key in self._elsewhere and key not in here):
                continue
            now = here.get(key)
            dtype = getattr(torch, spec.dtype)
            if now is None:
                room = torch.empty(spec.shape, dtype=dtype)
            elif specification(key, now) != spec:
                raise StateUnfit(
                    f"{tree.spelled(key)} is {spec.dtype}{list(spec.shape)} in the saved state, and "
                    f"{str(now.dtype).removeprefix('torch.')}{list(now.shape)} here. Trying again does not help: go "
                    f"back to what it was, or let it begin anew under another name, with accept={ACCEPT!r}"
                )
            else:
                room = sharded_like(now, torch.empty_like(local(now), memory_format=torch.contiguous_format))
            self._rooms[key] = TensorInMemory(spec=spec, tensor=room)
        return list(self._rooms.values())

    def load(self, kept: Mapping[str, KeptExtra]) -> None:
        """Give the objects the state that was read into `rooms`; StateUnfit, with its name, for one that refuses it."""
        rooms, self._rooms = self._rooms, {}
        for name, one in self._objects.items():
            if name not in kept or self._other(name, kept[name]):
                continue
            tensors = {key: room.tensor for key, room in rooms.items() if tree.name_of(key) == name}
            now = one.state_dict()
            state = tree.alike(tree.put_together(name, kept[name].state, tensors), now)
            metadata = getattr(now, "_metadata", None)
            if metadata is not None:
                state = _WithMetadata(state)
                state._metadata = metadata
            try:
                one.load_state_dict(state)
            except Exception as error:
                if is_lost_peer(error):
                    raise
                raise StateUnfit(
                    f"extra={name!r}: {kind_of(one)}.load_state_dict did not take the saved state: "
                    f"{type(error).__name__}: {' '.join(str(error).split())}. Trying again does not help: go back to "
                    f"what saved it, or let it begin anew under another name, with accept={ACCEPT!r}"
                ) from error

    def compare(self) -> None:
        """Raise UsageError, with its name, for what is not the same on all ranks that have it; a collective."""
        if not self._objects or self._mesh is None or self._mesh.layout.world == 1:
            return
        said: dict[str, str] = {}
        for name, apart in self._apart().items():
            said |= _of_values(name, apart.plain)
            said |= {
                f"{key}{_BOX}{box_of(tensor)}": _of_tensor(key, tensor, local(tensor))
                for key, tensor in apart.tensors.items()
                if box_of(tensor).numel
            }
        values = {label: one for label, one in said.items() if _BOX not in label}
        tensors = {label: one for label, one in said.items() if _BOX in label}
        self._refuse_unlike(values, tensors, "run.restore")

    def taken(self, *, tp: int) -> tuple[list[Tile], dict[str, KeptExtra]]:
        """Return copies of this rank's tiles, and what is to be kept beside them; and say `number` from then on.

        StateUnfit for what cannot be kept. tp: this rank's number on that axis.
        """
        states = self._states()
        self._say_what_comes_back_plain(states)
        tiles: list[Tile] = []
        kept: dict[str, KeptExtra] = {}
        self._said = {}
        for name, apart in _apart(states).items():
            kept[name] = KeptExtra(kind=kind_of(self._objects[name]), state=apart.plain)
            self._said |= _of_values(name, apart.plain)
            for key, tensor in apart.tensors.items():
                if isinstance(tensor, DTensor) and key not in self._before:
                    raise StateUnfit(
                        f"{tree.spelled(key)} has become a tensor that is spread over ranks since run.restore: how it "
                        "is cut would not be known where the state is loaded. Trying again does not help: make it "
                        "before run.restore"
                    )
                copy = local(tensor).clone(memory_format=torch.contiguous_format)
                box = box_of(tensor)
                if self._shared(key, tensor):
                    self._said[key] = _of_tensor(key, tensor, copy)
                if box.numel and not is_copy(tensor, tp):
                    tiles.append((specification(key, tensor), box, copy))
        if self._objects and self._mesh is not None and self._mesh.layout.world > 1:
            self.number = self._numbered()
        return tiles, kept

    def look(self, numbers: tuple[float, ...], step: int) -> None:
        """Raise UsageError, with its name, where ranks had different things in the snapshot of a step.

        numbers: those of all ranks in the vote, () where they are the same. A collective where they should be.
        """
        if not numbers or not self._objects or self._mesh is None:
            return
        layout = self._mesh.layout
        width = layout.stage_ranks
        everywhere = {int(number) >> _BITS for number in numbers}
        stages = [{int(n) for n in numbers[first : first + width]} for first in range(0, layout.world, width)]
        if len(everywhere) > 1 or any(len(stage) > 1 for stage in stages):
            self._refuse_unlike(*self._parted(), f"run.step: after step {step}")

    def held(self) -> list[TensorInMemory]:
        """Return all tensors."""
        return [TensorInMemory(spec=specification(key, one), tensor=one) for key, one in self._tensors().items()]

    def _states(self) -> dict[str, Any]:
        return {name: one.state_dict() for name, one in self._objects.items()}

    def _apart(self) -> dict[str, tree.Apart]:
        return _apart(self._states())

    def _say_what_comes_back_plain(self, states: Mapping[str, Any]) -> None:
        """Warn, once for each place, of what has a class that no object made anew has there."""
        plain = dict(set(_classes(states)) - self._anew)
        self._anew |= plain.items()
        if plain:
            where, kind = min(plain.items())
            more = f", and {len(plain) - 1} more are of such classes" if len(plain) > 1 else ""
            warnings.warn(
                f"{where} is {kind.__name__}, and there was none when the object was made{more}: where the state is "
                "loaded it is the plain tuple, dictionary, number or text that it also is. Have load_state_dict make "
                "it anew, or keep plain values there",
                stacklevel=2,
            )

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {key: tensor for apart in self._apart().values() for key, tensor in apart.tensors.items()}

    def _other(self, name: str, then: KeptExtra) -> bool:
        """Return whether the object of this name is not the one that was saved."""
        return name not in self._objects or kind_of(self._objects[name]) != then.kind

    def _shared(self, key: str, tensor: torch.Tensor) -> bool:
        """Return whether other ranks have to have the same tensor, so that it is compared in each vote."""
        if isinstance(tensor, DTensor) or self._mesh is None or self._mesh.layout.world == 1:
            return False
        if key in self._of_stage:
            return self._mesh.layout.stage_ranks > 1
        return key in self._everywhere or key not in self._before

    def _parted(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return what has to be the same on all ranks, and what on those of this stage, as the last snapshot has it."""
        of_all = {label: one for label, one in self._said.items() if label not in self._of_stage}
        return of_all, {label: one for label, one in self._said.items() if label in self._of_stage}

    def _numbered(self) -> float:
        """Return one number for what is the same on all ranks, above one for what is on those of this stage."""
        of_all, of_stage = map(_bits, self._parted())
        return float((of_all << _BITS) + of_stage)

    def _refuse_unlike(self, of_all: Mapping[str, str], of_some: Mapping[str, str], where: str) -> None:
        """Raise UsageError for what ranks say differently, and for what not all of them say of all; a collective."""
        assert self._mesh is not None
        first: dict[str, tuple[int, str]] = {}
        unlike: dict[str, tuple[int, int]] = {}
        rows = [json.loads(data) for data in self._mesh.gather(json.dumps([of_all, of_some]).encode())]
        for rank, said in enumerate(rows):
            for label, one in (said[0] | said[1]).items():
                there, known = first.setdefault(label, (rank, one))
                if known != one:
                    unlike.setdefault(label, (there, rank))
        for label in {label for said in rows for label in said[0]}:
            absent = [rank for rank, said in enumerate(rows) if label not in said[0]]
            if absent:
                unlike.setdefault(label, (first[label][0], absent[0]))
        if unlike:
            label, (a, b) = min(unlike.items())
            what = tree.spelled(label.partition(_BOX)[0]) if label.startswith(tree.PREFIX) else label
            more = f", and {len(unlike) - 1} more are not" if len(unlike) > 1 else ""
            raise UsageError(
                f"{where}: {what} is not the same on ranks {min(a, b)} and {max(a, b)}{more}. What is not cut like a "
                "parameter is kept once for all ranks. Make it from what all of them share, such as run.steps, "
                "loss.item() after run.step, or a generator with one seed; or leave it out of extra="
            )


def _apart(states: Mapping[str, Any]) -> dict[str, tree.Apart]:
    return {name: tree.taken_apart(name, state) for name, state in states.items()}


def _classes(states: Mapping[str, Any]) -> Iterator[tuple[str, type]]:
    for name, state in states.items():
        yield from tree.classes(state, f"extra[{name!r}]")


class _WithMetadata(dict[str, Any]):
    """A module's state with what torch keeps beside it: the versions of its modules."""

    _metadata: Any


def kind_of(one: Any) -> str:
    """Return the name of an object's class."""
    return type(one).__qualname__


def _check(name: Any, one: Any, owned: Collection[int], parameters: Collection[int]) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"run.restore: extra= has the name {name!r}: take letters, digits and _ . -, beginning with a letter"
        )
    if id(one) in owned:
        raise UsageError(f"run.restore: extra={name!r} is given to it already, and is kept as that; leave it out here")
    for method in ("state_dict", "load_state_dict"):
        if isinstance(one, type) or not callable(getattr(one, method, None)):
            raise UsageError(
                f"run.restore: extra={name!r} is {type(one).__name__}, which has no {method}: give an object with "
                "state_dict() and load_state_dict(state)"
            )
    groups = one.param_groups if isinstance(one, torch.optim.Optimizer) else ()
    if any(id(parameter) in parameters for group in groups for parameter in group["params"]):
        raise UsageError(
            f"run.restore: extra={name!r} is an optimizer of parameters of the model, whose state is numbered "
            "differently on each stage: give the model one optimizer with several groups, as optimizer="
        )


def _of_values(name: str, plain: Any) -> dict[str, str]:
    return {label: _digest(json.dumps(value, sort_keys=True)) for label, value in tree.entries(name, plain).items()}


def _of_tensor(key: str, tensor: torch.Tensor, part: torch.Tensor) -> str:
    spec = specification(key, tensor)
    held = buffer_of(part.detach().cpu().contiguous())
    return _digest(f"{spec.dtype} {spec.shape} {digest(spec, box_of(tensor), held)}")


def _digest(text: str) -> str:
    return blake3(text.encode()).hexdigest()[:32]


def _bits(said: Mapping[str, str]) -> int:
    return int(_digest(json.dumps(said, sort_keys=True)), 16) % (1 << _BITS)
