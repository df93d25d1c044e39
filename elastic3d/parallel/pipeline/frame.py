"""How a stage runs a model's forward: which tensor of the input is the chain's, and which of the output.

A model may take a dictionary and return an object. The chain's tensor, which stages pass on, is one entry of the
dictionary and one field of the object. A later stage puts the activation where the first stage has that entry; the
others, such as an attention mask, are the same on every stage. Only the last stage gives its whole output to the loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from elastic3d.parallel.foreign import Caller

Path = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """The structure of a module's output: a tensor at `hole` among leaves that are not tensors."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    hole: int

    def around(self, tensor: torch.Tensor) -> Any:
        """Return `tensor` as the module would have returned it."""
        return tree_unflatten([*self.leaves[: self.hole], tensor, *self.leaves[self.hole + 1 :]], self.spec)


def template_of(output: Any) -> Template | None:
    """Return the template of an output with one tensor and only plain values beside it; None for any other output."""
    leaves, spec = tree_flatten(output)
    holes = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    plain = all(leaf is None or isinstance(leaf, torch.Tensor | bool | int | float | str) for leaf in leaves)
    if len(holes) != 1 or not plain:
        return None
    kept = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    return Template(leaves=kept, spec=spec, hole=holes[0])


def tensors_in(output: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield the tensors of a model's output with their places: keys, positions and names of fields."""
    if isinstance(output, torch.Tensor):
        yield path, output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from tensors_in(value, (*path, key))
    elif isinstance(output, list | tuple):
        for index, value in enumerate(output):
            yield from tensors_in(value, (*path, index))
    elif dataclasses.is_dataclass(output):
        for field in dataclasses.fields(output):
            yield from tensors_in(getattr(output, field.name), (*path, field.name))


def spelled(path: Path) -> str:
    """Return a place in the output as code would write it."""
    return "output" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One model's frame. entry: key of the chain's tensor in the input, None where the input is that tensor itself."""

    caller: Caller
    entry: str | None
    entries: int
    path: Path

    @property
    def beside(self) -> bool:
        """Whether every stage needs the input, because it holds more than the chain's tensor."""
        return self.entries > 1

    def tensor(self, given: Any) -> Any:
        """Return the chain's tensor of an input."""
        return given if self.entry is None else given[self.entry]

    def run(self, model: nn.Module, tensor: torch.Tensor, given: Any) -> Any:
        """Return forward's output on this stage. tensor: the one that came to it. given: the micro-batch's input."""
        return self.caller(model, tensor if self.entry is None else {**(given or {}), self.entry: tensor})

    def pick(self, output: Any) -> Any:
        """Return the chain's tensor of an output."""
        for step in self.path:
            output = output[step] if isinstance(output, Mapping | list | tuple) else getattr(output, step)
        return output
