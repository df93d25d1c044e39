"""Cutting a model into pipeline stages without renaming anything in it.

The model's repeated layers, its *blocks*, are one ModuleList or ModuleDict named by its dotted path. A stage keeps a
contiguous run of them, as the layout's cuts say; every other block is replaced by `Absent`, so that the user's own
`forward` runs unchanged on every stage and parameter names stay global. Modules with parameters registered before the
blocks, at every level on the path to them, belong to the first stage; those registered after them to the last. `chain`
proves that a model's forward really is such a chain. Modules without parameters are cut when that proof is made, by
where forward runs them: a dropout between embedding and blocks belongs to the first stage, a table of rotary embeddings
to every stage.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import nn

from elastic3d.errors import LayoutError, ModelError
from elastic3d.parallel.numerics.recompute import Recompute
from elastic3d.parallel.pipeline.absent import Absent, Enters, Template, leave, run_between
from elastic3d.planner import schedules
from elastic3d.values import Layout

Blocks = nn.ModuleList | nn.ModuleDict


def find_blocks(model: nn.Module, path: str) -> Blocks:
    """Return the ModuleList or ModuleDict at a dotted path; ModelError naming the candidates if there is none."""
    try:
        module = model.get_submodule(path)
    except AttributeError:
        module = None
    if isinstance(module, Blocks) and path and len(module):
        return module
    candidates = [f"{name!r} ({len(m)})" for name, m in model.named_modules() if isinstance(m, Blocks) and len(m)]
    what = (
        "no such module"
        if module is None
        else f"a {type(module).__name__}, not a ModuleList or ModuleDict with blocks in it"
    )
    hint = f"Those in the model: {', '.join(candidates)}" if candidates else "the model has no such list; "
    if not candidates:
        hint += "keep the repeated layers in one, or leave blocks= out to train without pipeline stages"
    raise ModelError(f"blocks={path!r}: {what} in {type(model).__name__}. {hint}")


def comparable(model: nn.Module, path: str | None) -> bool:
    """Return whether all blocks are one work, which hooks may time.

    They are of one class, with parameters of the same names and shapes, and neither they nor what they are in is
    compiled in place or as a whole: a hook there would be compiled with it, which fails where no part may be left out.
    """
    if path is None:
        return False
    blocks = find_blocks(model, path)
    around = [model, *map(model.get_submodule, accumulate(path.split(".")[:-1], "{}.{}".format))]
    if any(one._compiled_call_impl is not None for one in (*around, *blocks.children())):
        return False
    # What `torch.compile` returns for a module holds it under this name.
    if any(hasattr(one, "_orig_mod") for one in around):
        return False
    shapes = [
        (type(one), [(name, parameter.shape) for name, parameter in one.named_parameters()])
        for one in blocks.children()
    ]
    return all(shape == shapes[0] for shape in shapes)


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
    """Refuse by name what stages cannot hold: parameters outside modules, and parameters shared across the blocks."""
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
                    "pipeline stages; untie them (a configuration of transformers has tie_word_embeddings=False for "
                    "that), or leave blocks= out to train without pipeline stages"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a rank. first, last: of the pipeline. blocks: all blocks by global name, stand-ins among them."""

    stage: int
    module: nn.Module
    first: bool = True
    last: bool = True
    blocks: tuple[tuple[str, nn.Module], ...] = ()

    @property
    def present(self) -> list[tuple[str, nn.Module]]:
        """The blocks that this stage really has."""
        return [(name, block) for name, block in self.blocks if not isinstance(block, Absent)]


def cut(model: nn.Module, path: str | None, layout: Layout, rank: int) -> list[Stage]:
    """Keep one pipeline rank's parameters in the model, replace the others' modules, and return the rank's stages.

    With one stage the part's module is the model itself. With several, each is a copy of the modules on the path to the
    blocks around the same blocks, with stand-ins for everything that belongs to other stages; the model keeps
    everything that the rank has, only for names and state. Without a path there is one stage, the whole model.
    """
    if path is None:
        return [Stage(stage=0, module=model)]
    count = len(find_blocks(model, path))
    if problem := schedules.stages_problem(layout, count):
        raise LayoutError(problem)
    if layout.stages > 1:
        check_ends(model, path)
    mine = schedules.stages_of_rank(layout, rank)
    runs = {stage: schedules.blocks_of_stage(layout, stage, count) for stage in mine}
    modules = dict.fromkeys(mine, model) if len(mine) == 1 else {stage: _copy(model, path) for stage in mine}
    for module, kept in [(model, mine), *((module, (stage,)) for stage, module in modules.items())]:
        blocks = find_blocks(module, path)
        names = list(blocks._modules)
        for index in set(range(count)).difference(*(runs[stage] for stage in kept)):
            setattr(blocks, names[index], Absent())
        before, after = ends(module, path)
        for name in ([] if 0 in kept else before) + ([] if layout.stages - 1 in kept else after):
            if any(True for _ in module.get_submodule(name).parameters()):
                module.set_submodule(name, Absent())
    return [
        Stage(
            stage=stage,
            module=module,
            first=stage == 0,
            last=stage == layout.stages - 1,
            blocks=tuple((f"{path}.{name}", block) for name, block in find_blocks(module, path).named_children()),
        )
        for stage, module in modules.items()
    ]


def cut_further(
    model: nn.Module, path: str, early: Mapping[str, Template], late: Collection[str], parts: Sequence[Stage]
) -> None:
    """Replace the modules without parameters that only the first or only the last stage runs where neither is.

    early, late: as a chain has them. The model keeps what any of its parts has, since buffers may be state.
    """
    whole = Stage(stage=0, module=model, first=any(p.first for p in parts), last=any(p.last for p in parts))
    for part in (whole, *parts):
        for name in (*(() if part.first else early), *(() if part.last else late)):
            if not isinstance(part.module.get_submodule(name), Absent):
                part.module.set_submodule(name, Absent())


def dress(
    part: Stage,
    activation: torch.Tensor,
    early: Mapping[str, Template],
    templates: Mapping[str, Template],
    device: torch.device,
) -> None:
    """Have a stage's forward run from the activation that comes to it to the one that leaves it.

    activation, early, templates: as a chain has them. device: where the stage computes.
    """
    present = [place for place, (_, block) in enumerate(part.blocks) if not isinstance(block, Absent)]
    first = templates.get(part.blocks[0][0])
    enters = None if part.first else Enters(shape=tuple(activation.shape), template=first, device=device)
    for place, (name, block) in enumerate(part.blocks):
        if not isinstance(block, Absent):
            continue
        if place == 0 and enters is not None:
            block.role = enters.activation
        elif place < present[0] and name in templates:
            assert enters is not None, "a stage that is not the first has blocks before its own"
            block.role = partial(enters.around, templates[name])
        elif place == present[-1] + 1:
            block.role = leave
    if enters is not None:
        for name, template in early.items():
            stand_in = part.module.get_submodule(name)
            assert isinstance(stand_in, Absent)
            stand_in.role = partial(enters.blank, template)
    if not (part.first and part.last):
        run_between(part.module, enters, ends=not part.last)


def _copy(model: nn.Module, path: str) -> nn.Module:
    """Return a copy of the model, and of the modules on the path down to the ModuleList, around the same modules."""
    copied = _shallow(model)
    parent = copied
    for name in path.split("."):
        child = _shallow(parent.get_submodule(name))
        parent.add_module(name, child)
        parent = child
    return copied


def _shallow(module: nn.Module) -> nn.Module:
    """Return a module of the same class with the same attributes and buffers, but its own children and hooks."""
    copied = module.__class__.__new__(module.__class__)
    copied.__dict__.update(module.__dict__)
    for name, value in module.__dict__.items():
        if name == "_modules" or name.endswith("_hooks") or "_hooks_" in name:
            copied.__dict__[name] = value.copy()
    return copied


def check_recompute(layout: Layout, recompute: Recompute) -> None:
    """Refuse selective recomputation for a schedule that splits a stage's backward pass.

    torch hands out the products it kept only once. Raises LayoutError.
    """
    schedule = schedules.schedule_of(layout)
    if schedule is not None and schedule.splits_backward and recompute is Recompute.SELECTIVE:
        raise LayoutError(
            f'{layout}: schedule {schedule} splits the backward pass of a stage, which recompute="selective" does not '
            'allow; use recompute="full", or schedule=interleaved or 1f1b'
        )
