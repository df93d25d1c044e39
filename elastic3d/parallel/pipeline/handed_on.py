"""A chain that was proven once, handed on to the other processes of a node.

The proof runs the model on meta several times, and its outcome depends only on the code: the process that measured the
model has it, and a trainer that runs the very same code need not prove it again each time a generation begins.
"""

from __future__ import annotations

import types
import uuid
from collections.abc import Iterator

import torch
from blake3 import blake3
from torch import nn

from elastic3d.parallel.foreign import Caller
from elastic3d.parallel.pipeline.absent import template_of
from elastic3d.parallel.pipeline.chain import Chain
from elastic3d.parallel.pipeline.frame import Frame
from elastic3d.values import BlankTensor, ProvenChain

IMAGE = uuid.uuid4().hex
"""Names what this process imported: processes forked from it have the same, a new interpreter has another."""


def hand_on(chain: Chain, model: nn.Module) -> ProvenChain | None:
    """Return a chain's proof for other processes; None for one that values of plain types do not describe.

    model: the whole model, before any part of it is wrapped or replaced.
    """
    forward = _forward_digest(model)
    plain = all(template.spec.is_leaf() for template in chain.early.values())
    if chain.templates or not plain or not forward:
        return None
    return ProvenChain(
        shape=tuple(chain.activation.shape),
        dtype=_name(chain.activation.dtype),
        early=tuple(
            BlankTensor(module=name, shape=blank.shape, dtype=_name(blank.dtype))
            for name, template in chain.early.items()
            for blank in template.leaves
        ),
        late=chain.late,
        entry=chain.frame.entry,
        everywhere=chain.frame.everywhere,
        image=IMAGE,
        forward=forward,
    )


def taken_over(proven: ProvenChain | None, model: nn.Module) -> Chain | None:
    """Return the chain that was proven, None where it has to be proven anew: here runs, or may run, other code."""
    if proven is None or proven.image != IMAGE or proven.forward != _forward_digest(model):
        return None
    activation = torch.empty(proven.shape, dtype=getattr(torch, proven.dtype), device="meta", requires_grad=True)
    early = {blank.module: template_of(_empty(blank)) for blank in proven.early}
    return Chain(
        activation=activation,
        early={name: template for name, template in early.items() if template is not None},
        late=proven.late,
        templates={},
        frame=Frame(caller=Caller(model), entry=proven.entry, everywhere=proven.everywhere),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _empty(blank: BlankTensor) -> torch.Tensor:
    return torch.empty(blank.shape, dtype=getattr(torch, blank.dtype), device="meta")


def _forward_digest(model: nn.Module) -> str:
    """Return a digest of what the modules' forward methods are, "" where that cannot be seen.

    A script may import its model only when `main` runs, long after the proof, and find another file there.
    """
    codes: dict[types.CodeType, None] = {}
    for module in model.modules():
        forward = getattr(module.forward, "__func__", module.forward)
        code = getattr(forward, "__code__", None)
        if not isinstance(code, types.CodeType):
            return ""
        codes[code] = None
    digest = blake3()
    for code in codes:
        for part in _parts(code):
            digest.update(part)
    return digest.hexdigest()


def _parts(code: types.CodeType) -> Iterator[bytes]:
    yield f"{code.co_qualname} {code.co_names} {code.co_varnames}".encode()
    yield code.co_code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _parts(constant)
        else:
            # Sets of strings have no order that two processes agree on.
            yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant).encode()
