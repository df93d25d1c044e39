"""Proof that a model's forward is a chain of modules, which is what pipeline stages can cut.

One forward pass is watched, as a rule on the meta device, where it costs no memory and no time. A forward is a chain if
each module with parameters runs once, those before the blocks, then the blocks in order, then those after them; if the
first argument of each *is* the output of the previous one, the same tensor or a view of all of it, and has not been
written to in between; and if the model returns the output of the last, and nothing else that was computed from its
input. Then nothing that forward does between modules can matter on a stage where they are absent. A module may return
its tensor in a tuple with plain values. Further arguments of a block may be anything that depends neither on the
chain's entry of the input nor on random numbers, such as rotary tables or masks made from shapes. Values are followed
through torch's operations.

A second pass has stand-ins for all modules and an activation as its input, as on a later stage: it must be a chain in
the same sense, and call every block with arguments like those of the first pass. That finds, for instance, a table
sized by a dim of the input that is another dim of an activation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elastic3d.errors import ModelError
from elastic3d.parallel.foreign import Caller
from elastic3d.parallel.pipeline.frame import Frame, Path, Template, spelled, template_of, tensors_in
from elastic3d.parallel.pipeline.stages import check_ends, ends, find_blocks
from elastic3d.parallel.pipeline.watch import Call, WatchedPass, same, version, watch

WITHOUT = "or leave blocks= out to train without pipeline stages"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A proven chain.

    activation: the tensor between blocks, on meta. links: names of its modules outside the blocks. templates: how
    modules that return more than their tensor return it. frame: how a stage runs forward.
    """

    activation: torch.Tensor
    links: tuple[str, ...]
    templates: Mapping[str, Template]
    frame: Frame


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
    blocks = [f"{path}.{name}" for name, _ in find_blocks(model, path).named_children()]
    before, after = ends(model, path)
    side = dict.fromkeys(before, 0) | dict.fromkeys(blocks, 1) | dict.fromkeys(after, 2)
    seen = watch(model, caller, list(side), example, skipping={})
    links = _links(model, seen, side, blocks)
    entry = _entry(links[0], example)
    templates = _check_links(links, seen, side, example if entry is None else example[entry], entry or "")
    activation = _activation(links, side, path)
    place = _place(seen, links[-1], templates)
    chain = Chain(
        activation=torch.empty(activation.shape, dtype=activation.dtype, device="meta", requires_grad=True),
        links=tuple(call.name for call in links if side[call.name] != 1),
        templates={name: template for name, template in templates.items() if not template.spec.is_leaf()},
        frame=Frame(caller=caller, entry=entry, entries=0 if entry is None else len(example), path=place),
    )
    _check_stand_ins(model, chain, templates, example, activation, links, seen, side)
    return chain


def check_runs(model: nn.Module, path: str, example: Any) -> None:
    """Raise ModelError, naming it, for a block that runs several times in one pass over `example`.

    A block's gradients are sent where its backward pass ends, which is once. For models that need not be chains.
    """
    blocks = [f"{path}.{name}" for name, _ in find_blocks(model, path).named_children()]
    ran = [call.name for call in watch(model, Caller(model), blocks, example, skipping={}).calls]
    for name in blocks:
        if ran.count(name) > 1:
            raise ModelError(
                f"module {name!r} runs {ran.count(name)} times in forward, and a block is sharded and reduced for one "
                "run; leave blocks= out, which shards the model as one"
            )


def _links(model: nn.Module, seen: WatchedPass, side: Mapping[str, int], blocks: list[str]) -> list[Call]:
    held = [name for name in side if any(True for _ in model.get_submodule(name).parameters())]
    ran = [call.name for call in seen.calls]
    for name in held:
        if ran.count(name) != 1:
            how = "does not run" if name not in ran else f"runs {ran.count(name)} times"
            raise ModelError(f"module {name!r} {how} in forward; a pipeline needs it to run once; {WITHOUT}")
    links = [c for c in seen.calls if c.name in held or side[c.name] == 1 or _hands_on(c, seen)]
    _check_order(links, side, blocks)
    return links


def _entry(first: Call, example: Any) -> str | None:
    if isinstance(example, torch.Tensor):
        return None
    for name, value in example.items():
        if same(value, first.first):
            return str(name)
    raise ModelError(
        f"module {first.name!r}, the first to run, is given none of the input's entries ({', '.join(example)}) as it "
        f"is; move what comes before it into the module, {WITHOUT}"
    )


def _check_links(
    links: list[Call], seen: WatchedPass, side: Mapping[str, int], origin: torch.Tensor, entry: str
) -> dict[str, Template]:
    templates: dict[str, Template] = {}
    previous, previous_name, went = origin, "the model's input", version(origin)
    for call in links:
        if not same(call.first, previous) or call.came != went:
            raise ModelError(
                f"forward computes something between {previous_name} and module {call.name!r}, which would be done "
                f"again on every pipeline stage; move it into one of the modules, {WITHOUT}"
            )
        for leaf in call.rest if side[call.name] else ():
            sources = seen.follow.sources(leaf)
            if entry in sources or "chance" in sources:
                what = "block" if side[call.name] == 1 else "module"
                how = "from the input's values, which later pipeline stages do not have"
                how = how if entry in sources else "from random numbers, which would be others on every pipeline stage"
                raise ModelError(
                    f"{what} {call.name!r} gets a further argument that was computed {how}; compute it inside the "
                    f"block, {WITHOUT}"
                )
        template = template_of(call.output)
        if template is None:
            raise ModelError(
                f"module {call.name!r} returns {_what(call.output)}; a pipeline needs a single tensor from each "
                f"module, so return the tensor alone or with plain values, {WITHOUT}"
            )
        templates[call.name] = template
        previous, previous_name, went = tensor_of(call), f"module {call.name!r}", call.went
    return templates


def tensor_of(call: Call) -> torch.Tensor:
    """Return the one tensor of a link's output."""
    ((_, tensor),) = tensors_in(call.output)
    return tensor


def _activation(links: list[Call], side: Mapping[str, int], path: str) -> torch.Tensor:
    activations = [tensor_of(call) for call in links if side[call.name] == 1]
    for activation in activations[:-1]:
        if (activation.shape, activation.dtype) != (activations[0].shape, activations[0].dtype):
            raise ModelError(f"blocks at {path!r} return tensors of different shapes or dtypes; {WITHOUT}")
    return activations[0]


def _place(seen: WatchedPass, last: Call, templates: Mapping[str, Template]) -> Path:
    """Return where the model's output has the last link's tensor; ModelError if it has other results as well."""
    place: Path | None = None
    for path, tensor in tensors_in(seen.output):
        if same(tensor, tensor_of(last)) and tensor._version == last.went:
            place = path if place is None else place
        elif path and seen.follow.sources(tensor):
            raise ModelError(
                f"forward returns {spelled(path)}, which it computes from its input beside the output of its last "
                f"module, {last.name!r}, and which a pipeline stage has only a part for; let the loss function compute "
                f"it (a loss from labels too: give them as the target), turn it off, {WITHOUT}"
            )
    if place is None:
        raise ModelError(
            f"forward returns {_what(seen.output)} that is not the output of its last module, module {last.name!r}; "
            f"return that tensor, {WITHOUT}"
        )
    return place


def _check_stand_ins(
    model: nn.Module,
    chain: Chain,
    templates: Mapping[str, Template],
    example: Any,
    activation: torch.Tensor,
    links: list[Call],
    seen: WatchedPass,
    side: Mapping[str, int],
) -> None:
    arrived = torch.zeros_like(activation)
    given = arrived if chain.frame.entry is None else {**example, chain.frame.entry: arrived}
    try:
        later = watch(model, chain.frame.caller, list(templates), given, skipping=templates)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ModelError(
            f"forward does not run on a later pipeline stage, where an activation of shape {tuple(activation.shape)} "
            f"stands for the input: {error}. Compute inside the modules what is computed from the input, {WITHOUT}"
        ) from error
    for first, again in zip(links, later.calls, strict=False):
        if first.name != again.name or not same(again.first, arrived) or again.came != version(arrived):
            raise ModelError(
                f"forward computes something before module {again.name!r} when an activation stands for its input, as "
                f"on a later pipeline stage; move it into one of the modules, {WITHOUT}"
            )
        if side[first.name] == 0:
            continue
        if len(first.rest) != len(again.rest) or not all(
            _alike(one, seen, other, later) for one, other in zip(first.rest, again.rest, strict=True)
        ):
            raise ModelError(
                f"module {first.name!r} gets other further arguments on a later pipeline stage, where an activation of "
                f"shape {tuple(activation.shape)} stands for the input; compute them inside the block, {WITHOUT}"
            )
    out = dict(tensors_in(later.output)).get(chain.frame.path)
    if out is None or not same(out, arrived):
        raise ModelError(f"forward returns something other than its last module's output on an inner stage; {WITHOUT}")


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


def _hands_on(call: Call, seen: WatchedPass) -> bool:
    """Whether a module without parameters is itself a link: its output enters another one, or is returned."""
    tensors = [tensor for _, tensor in tensors_in(call.output)]
    out = [tensor for _, tensor in tensors_in(seen.output)]
    return any(
        any(same(tensor, other) for other in out)
        or any(same(tensor, other.first) for other in seen.calls if other is not call)
        for tensor in tensors
    )


def _check_order(links: list[Call], side: Mapping[str, int], blocks: list[str]) -> None:
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
    if isinstance(output, torch.Tensor):
        return "a tensor"
    inside = sum(1 for _ in tensors_in(output))
    return f"a {type(output).__name__}" + (f" of {inside} tensors" if inside > 1 else "")
