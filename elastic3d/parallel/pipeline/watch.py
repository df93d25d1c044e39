"""Watches one forward pass: which modules ran, on what, and what was computed from which part of the input."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elastic3d.parallel.constants import Constants
from elastic3d.parallel.foreign import Caller
from elastic3d.parallel.pipeline.frame import Template
from elastic3d.parallel.pipeline.stages import Absent, first_of

# These read the shape of their argument, and not its values.
SHAPE_ONLY = {"zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a module. `first` is its first argument, `rest` the leaves of all others.

    came, went: versions of `first` and of the tensors of `output` at that time; a write in place changes them.
    """

    name: str
    first: Any
    rest: tuple[Any, ...]
    came: int
    output: Any
    went: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedPass:
    """One watched pass: calls in the order in which they ended."""

    calls: tuple[Call, ...]
    output: Any
    follow: Follow
    constants: Constants


class Follow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers for every tensor which entries of the input it was computed from; random numbers are from "chance"."""

    def __init__(self, entries: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: list[torch.Tensor] = []  # keeps their memory from reuse: they are told apart by it
        self._sources: dict[int, frozenset[str]] = {}
        for name, tensor in entries.items():
            self._note(tensor, frozenset({name}))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sources: frozenset[str] = frozenset()
        if func._schema.name.removeprefix("aten::") not in SHAPE_ONLY:
            sources = sources.union(*(self.sources(leaf) for leaf in tree_leaves((args, kwargs))))
        if torch.Tag.nondeterministic_seeded in func.tags:
            sources |= {"chance"}
        if sources:
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self._note(leaf, sources)
        return out

    def sources(self, leaf: Any) -> frozenset[str]:
        """Return which entries of the input a tensor was computed from; none for values that are not tensors."""
        return self._sources.get(_memory(leaf), frozenset()) if isinstance(leaf, torch.Tensor) else frozenset()

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
    model: nn.Module, caller: Caller, names: Collection[str], given: Any, *, skipping: Mapping[str, Template]
) -> WatchedPass:
    """Return one pass in training mode over an input, whose tensors are all on one device.

    names: modules to watch. skipping: those that pass their first argument on instead of running, as `Absent` does, and
    how they return it.
    """
    entries = dict(given) if isinstance(given, Mapping) else {"": given}
    entries = {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}
    device = next(iter(entries.values())).device
    follow, constants = Follow(entries), Constants()
    calls: list[Call] = []
    training = model.training
    # In training mode, since in evaluation dropout passes its input on, which would look like a module left out.
    # Tensors that forward makes without naming a device belong on the example's device, meta or real.
    with _noting(model, names, calls), _skipping(model, skipping):
        try:
            with torch.random.fork_rng(devices=[]), torch.device(device), torch.no_grad(), constants, follow:
                output = caller(model.train(), given)
        finally:
            model.train(training)
    return WatchedPass(calls=tuple(calls), output=output, follow=follow, constants=constants)


@contextmanager
def _noting(model: nn.Module, names: Iterable[str], calls: list[Call]) -> Iterator[None]:
    came: dict[str, int] = {}

    def before(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            came[name] = version(first_of(args, kwargs))

        return hook

    def after(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            rest = tree_leaves((args[1:], kwargs) if args else tuple(kwargs.values())[1:])
            calls.append(
                Call(
                    name=name,
                    first=first_of(args, kwargs),
                    rest=tuple(rest),
                    came=came[name],
                    output=output,
                    went=version(output),
                )
            )

        return hook

    handles: list[Any] = []
    for name in names:
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
        handles.append(module.register_forward_hook(after(name), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _skipping(model: nn.Module, templates: Mapping[str, Template]) -> Iterator[None]:
    modules = [(model.get_submodule(name), Absent(template).forward) for name, template in templates.items()]
    own = [vars(module).get("forward") for module, _ in modules]
    for module, stand_in in modules:
        vars(module)["forward"] = stand_in
    try:
        yield
    finally:
        for (module, _), forward in zip(modules, own, strict=True):
            del vars(module)["forward"]
            if forward is not None:
                vars(module)["forward"] = forward


def version(output: Any) -> int:
    """Return the version of the tensors of an output, which grows when one of them is written to."""
    return sum(leaf._version for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
