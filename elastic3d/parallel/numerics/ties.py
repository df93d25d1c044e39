"""Parameters that are one tensor under several names, such as an embedding and an output layer.

A tied parameter exists once in the state, under its first name, and so do its optimizer state and its place in an FSDP
unit; autograd adds the gradients of all its uses within a micro-batch before anything else is done with them, so that
its bits are as reproducible as any other parameter's. All its names must be in one FSDP unit: within one block, or
outside all blocks. The model's first and last part are one unit only while they are on one stage: a tie between them
needs pp = 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from elastic3d.errors import ModelError

Tie = tuple[str, str]


def ties(model: nn.Module) -> list[Tie]:
    """Return every further name of a parameter with its first one."""
    first: dict[int, str] = {}
    pairs = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            pairs.append((first[id(parameter)], name))
    return pairs


def check_ties(pairs: Iterable[Tie], blocks: Sequence[str]) -> None:
    """Refuse by name a tie that two units would have to hold. blocks: their names."""
    for one, other in pairs:
        homes = [next((b for b in blocks if name.startswith(f"{b}.")), "") for name in (one, other)]
        if homes[0] != homes[1]:
            raise ModelError(
                f"parameters {one!r} and {other!r} are one tensor, but blocks are sharded apart from each other and "
                "from the rest of the model; tie within one block or outside of all of them, or leave blocks= out"
            )


def parts_ends(pairs: Iterable[Tie], before: Sequence[str], after: Sequence[str]) -> bool:
    """Return whether a tie joins modules registered before the blocks to modules after them."""
    return any(_below(one, before) and _below(other, after) for one, other in pairs)


def tie_again(model: nn.Module, pairs: Iterable[Tie]) -> None:
    """Make tied parameters that were replaced one by one a single tensor again, if they are on this stage."""
    here = dict(model.named_parameters(remove_duplicate=False))
    for one, other in pairs:
        if one in here and other in here:
            parent, _, name = other.rpartition(".")
            setattr(model.get_submodule(parent), name, here[one])


def _below(name: str, modules: Sequence[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)
