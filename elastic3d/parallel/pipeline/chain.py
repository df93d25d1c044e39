"""Proof that a model's forward is a chain that pipeline stages can cut.

A few forward passes are watched, as a rule on the meta device, where they cost no memory and no time. A forward is a
chain if the blocks run once each and in order, and the first argument of each *is* a tensor that the previous one
returned, the same or a view of all of it, which has not been written to in between; if modules with parameters that are
registered before the blocks run only before them, and those registered after them only after them; and if it runs in
parts:

- What comes before the second block is computed on the first stage, where later blocks and what is after them are
  absent. It may be anything.
- A later stage runs the same code with blanks for what the modules before the blocks return, and takes up the
  activation at its blocks. So further arguments of blocks, and what forward does after the last block, on the last
  stage, may depend on shapes and on the input, which is then given to every stage, but neither on those blanks, nor on
  what other blocks returned, nor on random numbers drawn before the last block has ended.

Values are followed through torch's operations. Blocks have to get the same further arguments on a later stage as in the
whole model, as far as can be known on meta.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from elastic3d.errors import ModelError
from elastic3d.parallel.foreign import Caller
from elastic3d.parallel.pipeline.absent import Role, Template, leave, template_of
from elastic3d.parallel.pipeline.frame import Frame, entries_of, spelled, tensors_in
from elastic3d.parallel.pipeline.stages import check_ends, ends, find_blocks
from elastic3d.parallel.pipeline.watch import CHANCE, Call, WatchedPass, of_entry, of_module, same, watch

WITHOUT = "or leave blocks= out to train without pipeline stages"
UNABLE = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)
"""What forward raises where something that it uses is absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A proven chain.

    activation: the tensor between blocks, on meta. early: what modules return that only the first stage has, by their
    names. late: modules without parameters that only the last stage has. templates: how blocks return what is more than
    one tensor. frame: how a stage runs forward.
    """

    activation: torch.Tensor
    early: Mapping[str, Template]
    late: tuple[str, ...]
    templates: Mapping[str, Template]
    frame: Frame


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """The modules on and beside the path to the blocks, by name. held: those outside that have parameters."""

    before: Sequence[str]
    blocks: Sequence[str]
    after: Sequence[str]
    held: frozenset[str]

    @property
    def names(self) -> list[str]:
        return [*self.before, *self.blocks, *self.after]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """What is tried, and the pass of the whole model."""

    model: nn.Module
    caller: Caller
    example: Any
    parts: _Parts
    seen: WatchedPass

    def calls(self, names: Iterable[str]) -> list[Call]:
        """Return the calls of some modules in the order in which they ended."""
        wanted = set(names)
        return [call for call in self.seen.calls if call.name in wanted]


def prove(model: nn.Module, path: str, example: Any) -> Chain:
    """Return the chain of one forward pass over `example`; ModelError, naming the part, if it is not a chain.

    The model must be whole. Neither it nor the random number generators are changed.
    """
    check_ends(model, path)
    caller = Caller(model)
    if not isinstance(example, torch.Tensor) and not caller.spreads(example):
        raise ModelError(
            f"pipeline stages need an input that is one tensor, or a dictionary of what forward has parameters for, "
            f"not {type(example).__name__}; {WITHOUT}"
        )
    parts = _parts(model, path)
    first_stage = [name for name in parts.before if name in parts.held]
    seen = watch(model, caller, parts.names, example, marked=first_stage)
    trial = _Trial(model=model, caller=caller, example=example, parts=parts, seen=seen)
    _check_order(trial)
    blocks = trial.calls(parts.blocks)
    templates = _templates(blocks)
    activation = _activation(blocks, templates, path)
    early = {name: _blank(trial, name) for name in [*first_stage, *_early(trial)]}
    late = tuple(_late(trial))
    _check_first_stage(trial, late)
    everywhere = _check_later_stage(trial, early, templates)
    entry = None if isinstance(example, torch.Tensor) else _entry(trial, blocks[0].first)
    return Chain(
        activation=torch.empty(activation.shape, dtype=activation.dtype, device="meta", requires_grad=True),
        early=early,
        late=late,
        templates={name: template for name, template in templates.items() if not template.spec.is_leaf()},
        frame=Frame(caller=caller, entry=entry, everywhere=everywhere),
    )


def check_runs(model: nn.Module, path: str, example: Any) -> None:
    """Raise ModelError, naming it, for a block that runs several times in one pass over `example`.

    A block's gradients are sent where its backward pass ends, which is once. For models that need not be chains.
    """
    blocks = [f"{path}.{name}" for name, _ in find_blocks(model, path).named_children()]
    ran = [call.name for call in watch(model, Caller(model), blocks, example).calls]
    for name in blocks:
        if ran.count(name) > 1:
            raise ModelError(
                f"module {name!r} runs {ran.count(name)} times in forward, and a block is sharded and reduced for one "
                "run; leave blocks= out, which shards the model as one"
            )


def _parts(model: nn.Module, path: str) -> _Parts:
    before, after = ends(model, path)
    held = [name for name in (*before, *after) if any(True for _ in model.get_submodule(name).parameters())]
    blocks = [f"{path}.{name}" for name, _ in find_blocks(model, path).named_children()]
    return _Parts(before=before, blocks=blocks, after=after, held=frozenset(held))


def _entry(trial: _Trial, first: Any) -> str:
    """Return the first entry of the input that the first block's argument is computed from."""
    sources = trial.seen.follow.sources(first)
    for name in entries_of(trial.example):
        if of_entry(name) in sources:
            return name
    raise ModelError(
        f"what the first block gets is computed from none of the input's entries ({', '.join(trial.example)}), so that "
        f"nothing says of which shape it is; {WITHOUT}"
    )


def _check_order(trial: _Trial) -> None:
    """Check that blocks run once and in order, and other modules with parameters on their side of the blocks."""
    parts, ran = trial.parts, [call.name for call in trial.seen.calls]
    for name in parts.names:
        once = name in parts.blocks
        if (once and ran.count(name) != 1) or (name in parts.held and name not in ran):
            how = "does not run" if name not in ran else f"runs {ran.count(name)} times"
            raise ModelError(
                f"module {name!r} {how} in forward; a pipeline needs it to run{' once' if once else ''}; {WITHOUT}"
            )
    order = [name for name in ran if name in parts.blocks]
    if order != list(parts.blocks):
        where = next(a for a, b in zip(order, parts.blocks, strict=True) if a != b)
        raise ModelError(f"blocks run out of order: {where!r} comes where another should; {WITHOUT}")
    first, last = ran.index(parts.blocks[0]), ran.index(parts.blocks[-1])
    remedy = (
        "register modules in the order in which forward runs them: in `build`, an attribute that is deleted and set "
        f"again is registered last; {WITHOUT}"
    )
    for place, name in enumerate(ran):
        if name in parts.held and name in parts.before and place > first:
            after = "the blocks" if place > last else f"{parts.blocks[0]!r}"
            raise ModelError(f"module {name!r} is registered before the blocks, but runs after {after}; {remedy}")
        if name in parts.held and name in parts.after and place < last:
            raise ModelError(f"module {name!r} is registered after the blocks, but runs before them; {remedy}")


def _templates(blocks: list[Call]) -> dict[str, Template]:
    """Return the templates of the blocks, whose holes are what the next block takes."""
    templates: dict[str, Template] = {}
    hole = next((i for i, leaf in enumerate(tree_leaves(blocks[0].output)) if isinstance(leaf, torch.Tensor)), 0)
    for call, after in zip(blocks, [*blocks[1:], None], strict=True):
        leaves = tree_leaves(call.output)
        if after is not None:
            hole = _taken(call, after)
        template = template_of(call.output, hole)
        if template is None or hole >= len(leaves) or not isinstance(leaves[hole], torch.Tensor):
            raise ModelError(
                f"block {call.name!r} returns a {type(call.output).__name__}; a pipeline needs a tensor from each "
                f"block, alone or with other tensors and plain values in a tuple, list or dictionary; {WITHOUT}"
            )
        templates[call.name] = template
    return templates


def _taken(call: Call, after: Call) -> int:
    """Return which leaf of a block's output is the first argument of the next block."""
    versions = iter(call.went)
    for place, leaf in enumerate(tree_leaves(call.output)):
        if isinstance(leaf, torch.Tensor) and next(versions) == after.came and same(after.first, leaf):
            return place
    raise ModelError(
        f"forward computes something between module {call.name!r} and module {after.name!r}, where pipeline stages are "
        f"cut; move it into one of them, {WITHOUT}"
    )


def _activation(blocks: list[Call], templates: Mapping[str, Template], path: str) -> torch.Tensor:
    activations = [tree_leaves(call.output)[templates[call.name].hole] for call in blocks]
    for activation in activations[:-1]:
        if (activation.shape, activation.dtype) != (activations[0].shape, activations[0].dtype):
            raise ModelError(f"blocks at {path!r} return tensors of different shapes or dtypes; {WITHOUT}")
    first: torch.Tensor = activations[0]
    return first


def _blank(trial: _Trial, name: str) -> Template:
    """Return what a module before the blocks returns, each time that it runs."""
    templates = [template_of(call.output) for call in trial.calls([name])]
    template = templates[0]
    if template is None:
        what = type(trial.calls([name])[0].output).__name__
        raise ModelError(
            f"module {name!r} returns a {what}, for which a later pipeline stage has no stand-in; return tensors and "
            f"plain values, alone or in a tuple, list or dictionary, {WITHOUT}"
        )
    if any(other != template for other in templates):
        raise ModelError(
            f"module {name!r} runs {len(templates)} times in forward and returns tensors of several shapes or dtypes, "
            f"for which a later pipeline stage has one stand-in; {WITHOUT}"
        )
    return template


def _early(trial: _Trial) -> list[str]:
    """Return the modules without parameters that compute on what only the first stage has, before the blocks."""
    marks = {of_module(name) for name in trial.parts.before if name in trial.parts.held} | {CHANCE}
    return [
        name
        for name in _without_parameters(trial)
        if _ran(trial, name, after=False)
        and all(
            any(marks & trial.seen.follow.sources(leaf) for leaf in tree_leaves(call.output))
            for call in trial.calls([name])
        )
        and template_of(trial.calls([name])[0].output) is not None
    ]


def _late(trial: _Trial) -> list[str]:
    """Return the modules without parameters that run only after the blocks."""
    return [name for name in _without_parameters(trial) if _ran(trial, name, after=True)]


def _without_parameters(trial: _Trial) -> list[str]:
    parts = trial.parts
    return [name for name in (*parts.before, *parts.after) if name not in parts.held]


def _ran(trial: _Trial, name: str, *, after: bool) -> bool:
    """Whether a module ran only after the last block, or only before the first one."""
    ran, blocks = [call.name for call in trial.seen.calls], trial.parts.blocks
    where = [place for place, other in enumerate(ran) if other == name]
    if after:
        return bool(where) and where[0] > ran.index(blocks[-1])
    return bool(where) and where[-1] < ran.index(blocks[0])


def _check_first_stage(trial: _Trial, late: Iterable[str]) -> None:
    """Run what the first stage runs if it has one block, without all that is after it."""
    parts = trial.parts
    if len(parts.blocks) == 1:
        return
    gone: dict[str, Role] = dict.fromkeys([name for name in parts.after if name in parts.held] + list(late), _pass_on)
    try:
        here = watch(
            trial.model,
            trial.caller,
            parts.blocks[:1],
            trial.example,
            stand_ins={**gone, **dict.fromkeys(parts.blocks[1:], leave)},
            recording=True,
        )
    except UNABLE as error:
        raise ModelError(
            f"forward does not run on the first of several pipeline stages, where what comes after the first block is "
            f"absent: {error}; {WITHOUT}"
        ) from error
    if not here.recorded:
        raise ModelError(
            f"forward runs block {parts.blocks[1]!r} where autograd does not record, as torch.utils.checkpoint does "
            "with use_reentrant=True, and a pipeline stage that begins or ends there would get no gradients; use "
            f'use_reentrant=False, or run.shard(..., recompute="full"), {WITHOUT}'
        )
    _check_alike(trial.seen, trial.calls(parts.blocks[:1]), here, "the first of several pipeline stages")


def _check_later_stage(trial: _Trial, early: Mapping[str, Template], templates: Mapping[str, Template]) -> bool:
    """Run what the last stage runs, with stand-ins for its blocks; return whether it needs the input's values."""
    parts, last = trial.parts, trial.parts.blocks[-1]
    device = next(iter(entries_of(trial.example).values())).device
    roles: dict[str, Role] = {}
    for name, template in {**early, **templates}.items():
        # Made here, outside of the pass, so that nothing knows its values.
        roles[name] = partial(_answer, template.blank(device))
    marked = [*early, *parts.blocks]
    try:
        later = watch(
            trial.model, trial.caller, marked, trial.example, stand_ins=roles, marked=marked, drawn_until=last
        )
    except UNABLE as error:
        raise ModelError(
            f"forward does not run on a later pipeline stage, where modules before the blocks are absent: {error}. "
            f"Compute inside the modules what needs their attributes or values, {WITHOUT}"
        ) from error
    calls = [call for call in later.calls if call.name in parts.blocks]
    if [call.name for call in calls] != list(parts.blocks):
        raise ModelError(f"forward runs other blocks on a later pipeline stage than in the whole model; {WITHOUT}")
    for before, call in pairwise(calls):
        _taken(before, call)
    absent = frozenset({*map(of_module, [*early, *parts.blocks[:-1]]), CHANCE})
    needed = _check_arguments(calls[1:], later, absent | {of_module(last)})
    _check_alike(trial.seen, trial.calls(parts.blocks[1:]), later, "a later pipeline stage")
    if wrong := later.follow.read & absent:
        raise ModelError(
            f"forward decides by values that are computed from {_listed(wrong)}, which later pipeline stages do not "
            f"have; decide inside the module, {WITHOUT}"
        )
    needed |= later.follow.read | _check_output(trial, later, absent) | _check_buffers(trial, later, absent)
    whole = entries_of(trial.example).keys() == (trial.example.keys() if isinstance(trial.example, Mapping) else {""})
    return not whole or any(of_entry(name) in needed for name in entries_of(trial.example))


def _pass_on(first: Any) -> Any:
    return first


def _answer(answer: Any, _first: Any) -> Any:
    return answer


def _check_arguments(calls: Iterable[Call], later: WatchedPass, absent: frozenset[str]) -> frozenset[str]:
    """Check the further arguments of blocks; return what they are computed from."""
    needed: frozenset[str] = frozenset()
    for call in calls:
        for leaf in call.rest:
            sources = later.follow.sources(leaf)
            if wrong := sources & absent:
                raise ModelError(
                    f"block {call.name!r} gets a further argument that was computed from {_listed(wrong)}, which "
                    f"later pipeline stages do not have; compute it inside the block, {WITHOUT}"
                )
            needed |= sources
    return needed


def _check_output(trial: _Trial, later: WatchedPass, absent: frozenset[str]) -> frozenset[str]:
    """Check that forward returns on the last stage what it does on a whole model; return what it computes it from."""
    needed: frozenset[str] = frozenset()
    for path, tensor in tensors_in(later.output):
        sources = later.follow.sources(tensor)
        if wrong := sources & absent:
            raise ModelError(
                f"forward returns {spelled(path)}, which it computes from {_listed(wrong)}, and these are not on the "
                f"last pipeline stage; let a block or the loss function compute it, turn it off, {WITHOUT}"
            )
        needed |= sources
    whole, here = (
        [(path, tensor.shape, tensor.dtype) for path, tensor in tensors_in(one.output)] for one in (trial.seen, later)
    )
    if whole != here:
        different = next((path for path, *_ in set(whole) ^ set(here)), ())
        raise ModelError(
            f"forward returns another {spelled(different)} on the last pipeline stage than in the whole model; "
            f"turn it off, {WITHOUT}"
        )
    return needed


def _check_buffers(trial: _Trial, later: WatchedPass, absent: frozenset[str]) -> frozenset[str]:
    """Check that buffers outside the last stage are written alike on every stage; return what from."""
    needed: frozenset[str] = frozenset()
    for name, buffer in later.buffers:
        if any(name.startswith(f"{module}.") for module in (*trial.parts.after, *trial.parts.blocks)):
            continue
        sources = later.follow.sources(buffer)
        if wrong := sources & (absent | {of_module(trial.parts.blocks[-1])}):
            raise ModelError(
                f"forward writes into the buffer {name!r} what it computes from {_listed(wrong)}, which would leave "
                f"others on other pipeline stages; keep it in a module before or after the blocks, {WITHOUT}"
            )
        needed |= sources
    return needed


def _check_alike(seen: WatchedPass, calls: Iterable[Call], here: WatchedPass, where: str) -> None:
    again = {call.name: call for call in here.calls}
    for call in calls:
        other = again.get(call.name)
        if other is None:
            raise ModelError(f"module {call.name!r} does not run on {where}; {WITHOUT}")
        if len(call.rest) != len(other.rest) or not all(
            _alike(one, seen, two, here) for one, two in zip(call.rest, other.rest, strict=True)
        ):
            raise ModelError(
                f"module {call.name!r} gets other further arguments on {where} than in the whole model; compute them "
                f"inside the block, {WITHOUT}"
            )


def _alike(one: Any, first: WatchedPass, other: Any, later: WatchedPass) -> bool:
    """Whether two further arguments are the same as far as can be known: by value if they were computed from shapes."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        mine = first.constants.value(one) if one.is_meta else one
        theirs = later.constants.value(other) if other.is_meta else other
        return mine is None or theirs is None or torch.equal(mine, theirs)
    if isinstance(one, bool | int | float | str):
        return bool(one == other)
    return type(one) is type(other)


def _listed(sources: Iterable[str]) -> str:
    return ", ".join(sorted(sources))
