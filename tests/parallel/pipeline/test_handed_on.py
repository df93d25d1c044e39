"""A chain that one process has proven, taken over by another one that runs the same code."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from elastic3d.parallel import initial
from elastic3d.parallel.pipeline import chain
from elastic3d.parallel.pipeline.handed_on import hand_on, taken_over
from elastic3d.values import ProvenChain, from_json, to_json
from tests.parallel.models import Plain

TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6]], device="meta")


class Changed(Plain):
    """The same modules with another forward."""

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return super().forward(text)


def proven(build: Callable[[], nn.Module]) -> tuple[chain.Chain, ProvenChain | None]:
    model = initial.outline(build)
    proof = chain.prove(model, "blocks", TOKENS)
    return proof, hand_on(proof, model)


def test_a_proof_is_taken_over_as_it_was_found() -> None:
    """Through JSON, as it goes from process to process."""
    proof, handed = proven(Plain)
    assert handed is not None
    sent = from_json(ProvenChain, json.loads(json.dumps(to_json(handed))))
    assert sent == handed
    taken = taken_over(sent, initial.outline(Plain))
    assert taken is not None
    assert (taken.early, taken.late, taken.templates) == (proof.early, proof.late, proof.templates)
    assert list(proof.early) == ["embed", "drop"]
    assert (taken.frame.entry, taken.frame.everywhere) == (proof.frame.entry, proof.frame.everywhere)
    for ours, theirs in ((taken.activation, proof.activation),):
        assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
        assert ours.requires_grad == theirs.requires_grad


def test_other_code_takes_no_proof_over() -> None:
    """Another forward, or another process image whose code nobody has compared."""
    _, handed = proven(Plain)
    assert handed is not None
    assert taken_over(handed, initial.outline(Changed)) is None
    assert taken_over(replace(handed, image="another"), initial.outline(Plain)) is None
    assert taken_over(None, initial.outline(Plain)) is None


def test_a_forward_that_was_replaced_on_the_object_is_other_code() -> None:
    """Libraries do that; and what has no code of Python's is never handed on."""
    proof, handed = proven(Plain)
    model = initial.outline(Plain)
    former = model.forward
    model.forward = lambda text: former(text)  # type: ignore[method-assign]
    assert taken_over(handed, model) is None
    model.forward = len  # type: ignore[assignment]
    assert hand_on(proof, model) is None


def test_what_plain_values_do_not_describe_is_proven_each_time() -> None:
    """Templates of outputs hold structures of any type."""
    proof, _ = proven(Plain)
    template = chain.template_of((torch.empty(1), None))
    assert template is not None
    assert hand_on(replace(proof, templates={"blocks.0": template}), initial.outline(Plain)) is None
    assert hand_on(replace(proof, early={"embed": template}), initial.outline(Plain)) is None
