"""A small piece of an update, computed again by another rank: who cuts it, how it travels, and what it comes to.

What turns gradients into weights runs once, on one rank, and nothing else ever computes it again: an audit repeats
passes. But an optimizer whose every element depends on that element alone (`local_step.ELEMENTWISE`) does the same to a
piece as to the whole, bit for bit. So now and then each rank keeps what such a piece of its shard was before the
update, its gradient and its optimizer's state, and sends them to a rank of another node with the digests of what they
became. That rank clones its own optimizer onto the piece, shallowly (an object of the same class with a state and
groups of its own), makes the step, and compares.

All of it goes from trainer to trainer, rather than with the snapshots: those are not taken at every step, and what lies
in them is not known to be of two steps in a row. The piece rotates, so that every number is computed again in its turn.

That a piece gives the same bits is proved with each generation's own optimizer, on numbers made for it (`proved`).
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from elastic3d.data.permutation import key
from elastic3d.health.custody import GRAIN
from elastic3d.health.digest import digest_of
from elastic3d.parallel.numerics.local_step import ELEMENTWISE, alike, watched
from elastic3d.parallel.state import local

EVERY = 10
"""Steps from one recheck to the next."""

BYTES = 1 << 20
"""Bytes of numbers that a rank sends for one."""

HEADER = 8 << 10
"""Bytes of what is sent before them: which numbers they are, and what became of them, as JSON."""

SHIFTS = 64
"""Distances between a rank and the one that repeats it which are looked at, at most."""

SPARE = 4 << 10
"""Bytes of these that are left to numbers of the optimizer's state that are no tensors of the parameter's shape."""

Scalars = dict[str, Any]


class CannotRepeat(Exception):
    """A piece of this optimizer's update cannot be computed by itself; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Part of one parameter before its update, with all that the update depends on.

    group: options of the optimizer for it. state: tensors of its shape, and numbers.
    """

    group: Mapping[str, Any]
    parameter: torch.Tensor
    gradient: torch.Tensor
    state: Mapping[str, torch.Tensor]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All numbers in the order in which they are sent."""
        return [self.parameter, self.gradient, *(self.state[name] for name in sorted(self.state))]


def options_of(group: Mapping[str, Any]) -> Scalars:
    """Return a group's options as they are sent; CannotRepeat for what JSON does not hold exactly."""
    options = {name: value for name, value in group.items() if name != "params"}
    # As the step itself has it (`local_step`).
    if options.get("foreach", False) is None:
        options["foreach"] = False
    try:
        text = json.dumps(options)
    except (TypeError, ValueError) as error:
        raise CannotRepeat(f"the optimizer's options are no plain numbers: {error}") from error
    if len(text) > HEADER // 2:
        raise CannotRepeat(f"the optimizer's options take {len(text)} bytes")
    kept: Scalars = json.loads(text)
    return kept


def cut(optimizer: Optimizer, group: int, parameter: torch.Tensor, start: int, stop: int) -> Piece | None:
    """Return a copy of numbers [start, stop) of a parameter and its state before a step; None where there is no such
    update: without a gradient, with one that is cut or laid out otherwise, and where somebody's hooks see the step.

    parameter: a plain tensor, or what this rank holds of a distributed one, with `grad` likewise. CannotRepeat for
    state that is neither of its shape nor one number.
    """
    if parameter.grad is None or parameter.grad.layout != torch.strided or not alike(parameter) or _seen(optimizer):
        return None
    shard, gradient = local(parameter), local(parameter.grad)
    state = {}
    for name, value in optimizer.state.get(parameter, {}).items():
        if value is None:
            continue
        if not isinstance(value, torch.Tensor):
            raise CannotRepeat(f"the optimizer keeps {name!r} as {type(value).__name__}")
        held = local(value)
        if held.dim() and held.shape != shard.shape:
            raise CannotRepeat(f"the optimizer keeps {name!r} in another shape than its parameter")
        state[name] = held.reshape(-1)[start:stop].clone() if held.dim() else held.clone()
    return Piece(
        group=options_of(optimizer.param_groups[group]),
        parameter=shard.reshape(-1)[start:stop].clone(),
        gradient=gradient.reshape(-1)[start:stop].clone(),
        state=state,
    )


def _seen(optimizer: Optimizer) -> bool:
    """Return whether what the optimizer's step makes is not all its own: hooks, or a method put in its place."""
    own: Any = optimizer.__dict__.get("step")
    return watched(optimizer) or (own is not None and not hasattr(own, "_wrapped_by_lr_sched"))


def numbers_in(optimizer: Optimizer) -> int:
    """Return how many numbers of any parameter fit into `BYTES`, with their gradient and their state."""
    item, most = 1, 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = [value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, torch.Tensor)]
            item = max(item, *(value.element_size() for value in (parameter, *state)))
            most = max(most, sum(value.dim() > 0 for value in state))
    return (BYTES - SPARE) // (item * (2 + most)) // GRAIN * GRAIN


def digests_after(optimizer: Optimizer, parameter: torch.Tensor, start: int, stop: int) -> dict[str, int]:
    """Return the digests of the same numbers after the step, by name; that of the parameter under ""."""
    digests = {"": digest_of(local(parameter).reshape(-1)[start:stop])}
    for name, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, torch.Tensor):
            held = local(value)
            digests[name] = digest_of(held.reshape(-1)[start:stop] if held.dim() else held.reshape(1))
    return digests


def recomputed(optimizer: Optimizer, piece: Piece) -> dict[str, int]:
    """Return the digests of what the optimizer's step makes of a piece; the optimizer itself stays as it is."""
    parameter = torch.nn.Parameter(piece.parameter.clone())
    parameter.grad = piece.gradient.clone()
    clone = clone_of(optimizer, [{**piece.group, "params": [parameter]}])
    if piece.state:
        clone.state[parameter] = {name: value.clone() for name, value in piece.state.items()}
    clone.step()
    return digests_after(clone, parameter, 0, parameter.numel())


def clone_of(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return an optimizer of the same class and settings, with these groups, no state and nobody who watches it."""
    clone: Any = object.__new__(type(optimizer))
    clone.__dict__.update(optimizer.__dict__)
    # A schedule puts a method of its own here, bound to the optimizer that it was given.
    clone.__dict__.pop("step", None)
    for name in [name for name in clone.__dict__ if name.endswith("_hooks")]:
        clone.__dict__[name] = OrderedDict()
    clone.state = defaultdict(dict)
    clone.param_groups = groups
    made: Optimizer = clone
    return made


def proved(optimizer: Optimizer, device: torch.device) -> None:
    """Prove that pieces of this optimizer's updates give the bits of the whole; CannotRepeat where they do not.

    On numbers made for it, of an awkward length, over three steps, for each of its groups.
    """
    if type(optimizer) not in ELEMENTWISE:
        raise CannotRepeat(f"{type(optimizer).__name__} may compute one number's update from others")
    draw = torch.Generator().manual_seed(17)
    for group in optimizer.param_groups:
        options = options_of(group)
        whole = torch.nn.Parameter(torch.randn(1031, generator=draw).to(device))
        made = clone_of(optimizer, [{**options, "params": [whole]}])
        for _ in range(3):
            whole.grad = torch.randn(1031, generator=draw).to(device)
            piece = cut(made, 0, whole, 104, 747)
            assert piece is not None
            made.step()
            if recomputed(made, piece) != digests_after(made, whole, 104, 747):
                name = type(optimizer).__name__
                raise CannotRepeat(f"a piece of {name}'s update does not come to the bits that it has in the whole")


def pack(piece: Piece, digests: Mapping[str, int], size: int) -> torch.Tensor:
    """Return a piece and what became of it as `size` bytes on the CPU; CannotRepeat where they are too few."""
    header: Scalars = {
        "group": dict(piece.group),
        "state": sorted(piece.state),
        "tensors": [[str(one.dtype).removeprefix("torch."), list(one.shape)] for one in piece.tensors],
        "digests": dict(digests),
    }
    text = json.dumps(header).encode()
    room = torch.zeros(size, dtype=torch.uint8)
    needed = HEADER + sum(one.nbytes for one in piece.tensors)
    if len(text) >= HEADER or needed > size:
        raise CannotRepeat(f"a piece of {needed} bytes, described in {len(text)}, does not fit into {size}")
    room[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    at = HEADER
    for one in piece.tensors:
        room[at : at + one.nbytes] = one.detach().reshape(-1).view(torch.uint8).cpu()
        at += one.nbytes
    return room


def unpack(room: torch.Tensor, device: torch.device) -> tuple[Piece, dict[str, int]] | None:
    """Return what `pack` made, its numbers on `device`; None where nothing was sent."""
    text = room[:HEADER].numpy().tobytes().rstrip(b"\0")
    if not text:
        return None
    header = json.loads(text)
    at, tensors = HEADER, []
    for name, shape in header["tensors"]:
        dtype = getattr(torch, name)
        numel = 1
        for size in shape:
            numel *= size
        stop = at + numel * dtype.itemsize
        tensors.append(room[at:stop].clone().view(dtype).reshape(shape).to(device))
        at = stop
    parameter, gradient, *state = tensors
    piece = Piece(
        group=header["group"],
        parameter=parameter,
        gradient=gradient,
        state=dict(zip(header["state"], state, strict=True)),
    )
    return piece, {name: int(value) for name, value in header["digests"].items()}


def one_digest(digests: Mapping[str, int]) -> int:
    """Return one number for the digests of a piece, by name."""
    total = 0
    for name, value in sorted(digests.items()):
        total += value * (2 * int(key("recheck", name) % (1 << 32)) + 1)
    return total & ((1 << 64) - 1)


def shift_at(step: int, shifts: Sequence[int], *, seed: int) -> int | None:
    """Return by how much the ranks are shifted that repeat a piece of step `step`; None if none is repeated.

    Exactly one step of each `EVERY` in a row, drawn anew for each run of them.
    """
    window, place = divmod(step, EVERY)
    if not shifts or int(key("recheck", seed, window)) % EVERY != place:
        return None
    return shifts[int(key("recheck shift", seed, step)) % len(shifts)]


def shifts_of(nodes: Sequence[str], devices: Sequence[str]) -> tuple[int, ...]:
    """Return the shifts that bring most ranks together with one of another node, of those that bring unlike devices
    together nowhere; none if there is none.
    """
    world = len(nodes)
    step = max(1, (world - 1) // SHIFTS)
    apart: dict[int, int] = {}
    for shift in range(1, world, step):
        pairs = [(rank, (rank + shift) % world) for rank in range(world)]
        if all(devices[one] == devices[other] for one, other in pairs):
            apart[shift] = sum(nodes[one] != nodes[other] for one, other in pairs)
    best = max(apart.values(), default=0)
    return tuple(shift for shift, count in apart.items() if count == best and best)
