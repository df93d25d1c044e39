"""The modules that are prepared together: a block, or everything that is in no block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """A part of a model by global names. block: the name of its block, "" for what is in none of `blocks`."""

    model: nn.Module
    block: str = ""
    blocks: frozenset[str] = frozenset()

    def holds(self, name: str) -> bool:
        """Return whether a module or parameter of this global name belongs here."""
        if self.block:
            return name == self.block or name.startswith(f"{self.block}.")
        parts = name.split(".")
        return not any(".".join(parts[:end]) in self.blocks for end in range(1, len(parts) + 1))

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules with their global names."""
        if self.block:
            yield from self.model.get_submodule(self.block).named_modules(prefix=self.block)
        else:
            yield from (named for named in self.model.named_modules() if self.holds(named[0]))

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters under all their global names."""
        for name, module in self.modules():
            for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                yield f"{name}.{key}".lstrip("."), parameter
