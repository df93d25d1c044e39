"""Proof that a model's forward is a chain of modules, which is what pipeline stages can cut.

One forward pass is watched, as a rule on the meta device, where it costs no memory and no time. A chain is: each module
with parameters runs once, those before the blocks, then the blocks in order, then those after them; the first argument
of each *is* the output of the one before, the very tensor; the model returns the output of the last. Then nothing that
forward does between modules can matter on a stage where they are absent. Further arguments of a block may be anything
that was not computed from the input's values, such as rotary tables. Values are followed through torch's operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elastic3d.errors import ModelError
from elastic3d.parallel.pipeline.stages import check_ends, ends, find_blocks

WITHOUT = "or leave blocks= out to train without pipeline stages"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a link of the chain. `first` is its first positional argument, `rest` all other tensors."""

    name: str
    first: Any
    rest: tuple[torch.Tensor, ...]
    output: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A proven chain. activation: what blocks hand on, on meta. links: names of its modules outside the blocks."""

    activation: torch.Tensor
    links: tuple[str, ...]


class _Follow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remember every tensor that was computed from the input."""

    def __init__(self, origin: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = [origin]  # keeps them alive, so that ids stay theirs
        self._ids = {id(origin)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(id(leaf) in self._ids for leaf in tree_leaves((args, kwargs))):
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self._kept.append(leaf)
                    self._ids.add(id(leaf))
        return out

    def followed(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._ids


def prove(model: nn.Module, path: str, example: Any) -> Chain:
    """Return the chain that one forward pass over `example` is; ModelError, naming the part, where it is none.

    The model must be whole. Neither it nor the random number generators are changed.
    """
    check_ends(model, path)
    if not isinstance(example, torch.Tensor):
        raise ModelError(f"pipeline stages need an input that is one tensor, not {type(example).__name__}; {WITHOUT}")
    blocks = [f"{path}.{name}" for name, _ in find_blocks(model, path).named_children()]
    before, after = ends(model, path)
    side = dict.fromkeys(before, 0) | dict.fromkeys(blocks, 1) | dict.fromkeys(after, 2)
    calls, output, follow = _watch(model, list(side), example)
    held = [name for name in side if any(True for _ in model.get_submodule(name).parameters())]
    ran = [call.name for call in calls]
    for name in held:
        if ran.count(name) != 1:
            how = "does not run" if name not in ran else f"runs {ran.count(name)} times"
            raise ModelError(f"module {name!r} {how} in forward; a pipeline needs it to run once; {WITHOUT}")
    links = [call for call in calls if call.name in held or side[call.name] == 1 or _hands_on(call, calls, output)]
    _check_order(links, side, blocks)
    previous: Any = example
    previous_name = "the model's input"
    for call in links:
        if call.first is not previous:
            raise ModelError(
                f"forward computes something between {previous_name} and module {call.name!r}, which would be done "
                f"again on every pipeline stage; move it into one of the modules, {WITHOUT}"
            )
        for tensor in call.rest:
            if side[call.name] == 1 and follow.followed(tensor):
                raise ModelError(
                    f"block {call.name!r} gets a further argument that was computed from the input's values, which "
                    f"later pipeline stages do not have; compute it inside the block, {WITHOUT}"
                )
        if not isinstance(call.output, torch.Tensor):
            raise ModelError(
                f"module {call.name!r} returns {type(call.output).__name__}; a pipeline needs a single tensor from "
                f"each module, so return the tensor alone, {WITHOUT}"
            )
        previous, previous_name = call.output, f"module {call.name!r}"
    if output is not previous:
        raise ModelError(
            f"forward returns {_what(output)} that is not the output of its last module, {previous_name}; "
            f"return that tensor, {WITHOUT}"
        )
    activations = [call.output for call in links if side[call.name] == 1]
    for activation in activations[:-1]:
        if (activation.shape, activation.dtype) != (activations[0].shape, activations[0].dtype):
            raise ModelError(f"blocks at {path!r} return tensors of different shapes or dtypes; {WITHOUT}")
    activation = activations[0]
    return Chain(
        activation=torch.empty(activation.shape, dtype=activation.dtype, device="meta", requires_grad=True),
        links=tuple(call.name for call in links if side[call.name] != 1),
    )


def _watch(model: nn.Module, names: list[str], example: torch.Tensor) -> tuple[list[Call], Any, _Follow]:
    calls: list[Call] = []
    follow = _Follow(example)
    handles = []
    training = model.training

    def hook(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            first = args[0] if args else None
            rest = tuple(t for t in tree_leaves((args[1:], kwargs)) if isinstance(t, torch.Tensor))
            calls.append(Call(name=name, first=first, rest=rest, output=output))

        return note

    for name in names:
        handles.append(model.get_submodule(name).register_forward_hook(hook(name), with_kwargs=True))
    try:
        # In training mode: dropout hands its input on in evaluation, which would look like a module left out.
        # What forward makes without naming a device belongs beside the example, meta or real.
        with torch.random.fork_rng(devices=[]), torch.device(example.device), torch.no_grad(), follow:
            output = model.train()(example)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return calls, output, follow


def _hands_on(call: Call, calls: list[Call], output: Any) -> bool:
    """Whether a module without parameters is itself a link: its output goes into another one, or out."""
    return call.output is output or any(other.first is call.output for other in calls if other is not call)


def _check_order(links: list[Call], side: dict[str, int], blocks: list[str]) -> None:
    ran = [call.name for call in links if side[call.name] == 1]
    if ran != blocks:
        where = next((a for a, b in zip(ran, blocks, strict=False) if a != b), "a block")
        raise ModelError(f"blocks run out of order: {where!r} comes where another should; {WITHOUT}")
    reached, last = 0, ""
    for call in links:
        if side[call.name] < reached:
            raise ModelError(
                f"module {call.name!r} is registered before the blocks or is one of them, but runs after {last!r}; "
                "register modules in the order in which forward runs them"
            )
        if side[call.name] == 2 and reached == 0:
            raise ModelError(
                f"module {call.name!r} is registered after the blocks but runs before them; "
                "register modules in the order in which forward runs them"
            )
        reached, last = side[call.name], call.name


def _what(output: Any) -> str:
    return "a tensor" if isinstance(output, torch.Tensor) else f"a {type(output).__name__}"
