"""Watches one forward pass: which modules ran, on what, and what was computed from which part of the input."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elastic3d.parallel.constants import Constants
from elastic3d.parallel.foreign import Caller, uncompiled
from elastic3d.parallel.pipeline.absent import Absent, Reached, Role, first_of
from elastic3d.parallel.pipeline.frame import entries_of

# These read the shape of their argument, and not its values.
SHAPE_ONLY = {"zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"}
# The results of these are values that Python code goes on with, or have shapes that depend on values.
READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

CHANCE = "random numbers"


def of_entry(name: str) -> str:
    """Return the source that an entry of the input is."""
    return f"entry {name!r} of the input"


def of_module(name: str) -> str:
    """Return the source that a module is."""
    return f"module {name!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a module. `first` is its first argument, `rest` the leaves of all others.

    came, went: versions of `first` and of the tensors among the leaves of `output` at that time; a write in place
    changes them.
    """

    name: str
    first: Any
    rest: tuple[Any, ...]
    came: int
    output: Any
    went: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedPass:
    """One watched pass: calls in the order in which they ended.

    output: None if it left the stage before its end. recorded: whether autograd recorded the pass where it left.
    """

    calls: tuple[Call, ...]
    output: Any
    follow: Follow
    constants: Constants
    buffers: tuple[tuple[str, torch.Tensor], ...]
    recorded: bool


class Follow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers for every tensor what it was computed from: entries of the input, marked modules, random numbers.

    read: what values were computed from that forward asked for. chance: whether random numbers count.
    """

    def __init__(self, entries: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: list[torch.Tensor] = []  # keeps their memory from reuse: they are told apart by it
        self._sources: dict[int, frozenset[str]] = {}
        self.read: frozenset[str] = frozenset()
        self.chance = True
        for name, tensor in entries.items():
            self._note(tensor, frozenset({of_entry(name)}))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sources: frozenset[str] = frozenset()
        if func._schema.name.removeprefix("aten::") not in SHAPE_ONLY:
            sources = sources.union(*(self.sources(leaf) for leaf in tree_leaves((args, kwargs))))
        if self.chance and torch.Tag.nondeterministic_seeded in func.tags:
            sources |= {CHANCE}
        if any(tag in func.tags for tag in READS):
            self.read |= sources
        if sources:
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self._note(leaf, sources)
        return out

    def sources(self, leaf: Any) -> frozenset[str]:
        """Return what a tensor was computed from; nothing for values that are not tensors."""
        return self._sources.get(_memory(leaf), frozenset()) if isinstance(leaf, torch.Tensor) else frozenset()

    def mark(self, output: Any, source: str) -> None:
        """Have `source` be among what the tensors of an output were computed from."""
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf, frozenset({source}))

    def _note(self, tensor: torch.Tensor, sources: frozenset[str]) -> None:
        self._kept.append(tensor)
        self._sources[_memory(tensor)] = self._sources.get(_memory(tensor), frozenset()) | sources


def same(one: Any, other: Any) -> bool:
    """Whether both are one tensor, or views of the same elements in the same order."""
    if one is other:
        return True
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return _memory(one) == _memory(other) and (
        (one.shape, one.stride(), one.storage_offset(), one.dtype)
        == (other.shape, other.stride(), other.storage_offset(), other.dtype)
    )


def watch(
    model: nn.Module,
    caller: Caller,
    names: Collection[str],
    given: Any,
    *,
    stand_ins: Mapping[str, Role] = MappingProxyType({}),
    marked: Collection[str] = (),
    drawn_until: str = "",
    recording: bool = False,
) -> WatchedPass:
    """Return one pass in training mode over an input, whose tensors are all on one device.

    names: modules to watch. stand_ins: roles of those that are absent. marked: modules whose outputs `Follow` is to
    know. drawn_until: the module after which random numbers no longer count. recording: have autograd record the pass.
    """
    entries = entries_of(given)
    device = next(iter(entries.values())).device
    follow, constants = Follow(entries), Constants()
    calls: list[Call] = []

    def ended(call: Call) -> None:
        calls.append(call)
        if call.name in marked:
            follow.mark(call.output, of_module(call.name))
        if call.name == drawn_until:
            follow.chance = False

    output, recorded, training = None, recording, model.training
    # In training mode, since in evaluation dropout passes its input on, which would look like a module left out.
    # Tensors that forward makes without naming a device belong on the example's device, meta or real.
    with _absent(model, stand_ins), _noting(model, names, ended):
        try:
            with (
                torch.random.fork_rng(devices=[]),
                uncompiled(),
                torch.device(device),
                torch.set_grad_enabled(recording),
                constants,
                follow,
            ):
                output = caller(model.train(), given)
        except Reached as reached:
            recorded = reached.recorded
        finally:
            model.train(training)
        buffers = tuple(model.named_buffers())
    return WatchedPass(
        calls=tuple(calls), output=output, follow=follow, constants=constants, buffers=buffers, recorded=recorded
    )


@contextmanager
def _noting(model: nn.Module, names: Iterable[str], ended: Callable[[Call], None]) -> Iterator[None]:
    came: dict[str, int] = {}

    def before(name: str) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            came[name] = version(first_of(args, kwargs))

        return hook

    def after(name: str) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            rest = tree_leaves((args[1:], kwargs) if args else tuple(kwargs.values())[1:])
            went = tuple(leaf._version for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
            first = first_of(args, kwargs)
            ended(Call(name=name, first=first, rest=tuple(rest), came=came[name], output=output, went=went))

        return hook

    handles: list[Any] = []
    for name in names:
        watched = model.get_submodule(name)
        handles.append(watched.register_forward_pre_hook(before(name), with_kwargs=True))
        handles.append(watched.register_forward_hook(after(name), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _absent(model: nn.Module, roles: Mapping[str, Role]) -> Iterator[None]:
    """Have stand-ins in the places of modules, as on a stage that has none of their attributes."""
    whole = {name: model.get_submodule(name) for name in roles}
    try:
        for name, role in roles.items():
            _put(model, name, Absent(role))
        yield
    finally:
        for name, module in whole.items():
            _put(model, name, module)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    model.get_submodule(parent)._modules[last] = module


def version(output: Any) -> int:
    """Return the version of the tensors of an output, which grows when one of them is written to."""
    return sum(leaf._version for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
