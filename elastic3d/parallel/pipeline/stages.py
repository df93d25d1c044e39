"""Cutting a model into pipeline stages without renaming anything in it.

The model's repeated layers, its *blocks*, are one ModuleList named by its dotted path. Stage s keeps a contiguous run
of them; every other block is replaced by `Absent`, which hands its first argument on, so that the user's own `forward`
runs unchanged on every stage and parameter names stay global. What is registered before the blocks, at every level on
the path to them, belongs to the first stage; what is registered after them to the last. That a model's forward really
is such a chain is proved by `chain`, not here. Modules without parameters are cut when that proof is made: a dropout
between embedding and blocks must run once, a table of rotary embeddings on every stage.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from elastic3d.errors import ModelError
from elastic3d.planner.shares import stage_of_block


class Absent(nn.Module):
    """Stand in for a module of another stage: return the first argument."""

    def forward(self, first: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        """Return `first` unchanged."""
        return first


def find_blocks(model: nn.Module, path: str) -> nn.ModuleList:
    """Return the ModuleList at a dotted path; ModelError naming the candidates where there is none."""
    try:
        found = model.get_submodule(path)
    except AttributeError:
        found = None
    if isinstance(found, nn.ModuleList) and path and len(found):
        return found
    candidates = [
        f"{name!r} ({len(m)})" for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)
    ]
    what = "no such module" if found is None else f"a {type(found).__name__}, not a ModuleList with blocks in it"
    hint = f"ModuleLists in the model: {', '.join(candidates)}" if candidates else "the model has no ModuleList; "
    if not candidates:
        hint += "keep the repeated layers in one, or leave blocks= out to train without pipeline stages"
    raise ModelError(f"blocks={path!r}: {what} in {type(model).__name__}. {hint}")


def ends(model: nn.Module, path: str) -> tuple[list[str], list[str]]:
    """Return the names of the modules registered before and after the blocks, at every level of the path."""
    before: list[str] = []
    after: list[str] = []
    names = path.split(".")
    parent, prefix = model, ""
    for name in names:
        side = before
        for child, _ in parent.named_children():
            if child == name:
                side = after
            else:
                side.append(prefix + child)
        parent = parent.get_submodule(name)
        prefix += name + "."
    return before, after


def check_ends(model: nn.Module, path: str) -> None:
    """Refuse by name what stages cannot hold: parameters between modules, and parameters shared across the blocks."""
    before, after = ends(model, path)
    parent, prefix = model, ""
    for name in path.split("."):
        own = [prefix + n for n, _ in parent.named_parameters(recurse=False)]
        if own:
            raise ModelError(
                f"parameter {own[0]!r} is used by forward outside of any module, where pipeline stages cannot follow "
                "it; put it into a module of its own, or leave blocks= out to train without pipeline stages"
            )
        prefix += name + "."
        parent = parent.get_submodule(name)
    homes: dict[int, str] = {}
    blocks = [f"{path}.{name}" for name, _ in find_blocks(model, path).named_children()]
    sides = dict.fromkeys(before, "first") | dict.fromkeys(after, "last") | {name: name for name in blocks}
    for name, side in sides.items():
        for inner, parameter in model.get_submodule(name).named_parameters():
            home = homes.setdefault(id(parameter), f"{side}|{name}.{inner}")
            if home.split("|")[0] != side:
                raise ModelError(
                    f"parameters {home.split('|')[1]!r} and '{name}.{inner}' are one tensor, but would be on different "
                    "pipeline stages; untie them, or leave blocks= out to train without pipeline stages"
                )


def cut(model: nn.Module, path: str, *, stage: int, stages: int) -> list[tuple[str, nn.Module]]:
    """Keep one stage's parameters in the model and replace the others' modules.

    Returns all blocks and stand-ins by global name.
    """
    blocks = find_blocks(model, path)
    if stages > len(blocks):
        raise ModelError(f"{stages} pipeline stages need as many blocks; blocks={path!r} has {len(blocks)}")
    if stages > 1:
        check_ends(model, path)
        for index in range(len(blocks)):
            if stage_of_block(index, len(blocks), stages) != stage:
                blocks[index] = Absent()
        before, after = ends(model, path)
        for name in ([] if stage == 0 else before) + ([] if stage == stages - 1 else after):
            if any(True for _ in model.get_submodule(name).parameters()):
                model.set_submodule(name, Absent())
    return [(f"{path}.{name}", block) for name, block in blocks.named_children()]


def cut_links(model: nn.Module, path: str, links: Collection[str], *, stage: int, stages: int) -> None:
    """Replace the links of the chain that hold no parameters and belong to another stage."""
    before, after = ends(model, path)
    for name in ([] if stage == 0 else before) + ([] if stage == stages - 1 else after):
        if name in links:
            model.set_submodule(name, Absent())
