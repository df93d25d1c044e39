"""How a stage runs a model's forward: on which input, and with which activation.

A model may take a dictionary and return any object. Only the last stage gives its whole output to the loss. A stage
that needs nothing of the input's values runs on zeros of its shape, so that its ranks need not load it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elastic3d.parallel.foreign import Caller
from elastic3d.parallel.pipeline.absent import ARRIVED

Path = tuple[Any, ...]


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


def entries_of(given: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of an input by their names; "" is that of an input that is one tensor."""
    entries = given if isinstance(given, Mapping) else {"": given}
    return {str(name): value for name, value in entries.items() if isinstance(value, torch.Tensor)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One model's frame.

    entry: key of what the activation is computed from in an input, None where the input is that tensor. everywhere:
    whether later stages need the values of the input.
    """

    caller: Caller
    entry: str | None
    everywhere: bool

    def tensor(self, given: Any) -> torch.Tensor:
        """Return what the activation is computed from."""
        tensor: torch.Tensor = given if self.entry is None else given[self.entry]
        return tensor

    def run(self, model: nn.Module, given: Any, arrived: torch.Tensor | None) -> Any:
        """Return what forward makes on this stage. arrived: the activation, None on the first stage."""
        return self.caller(model, given, {} if arrived is None else {ARRIVED: arrived})
