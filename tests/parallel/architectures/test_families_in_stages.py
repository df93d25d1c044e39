"""Families of transformers cut into stages in one process: losses and gradients of the whole, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic3d.devices.cpu import CpuDevice
from elastic3d.parallel import initial
from elastic3d.parallel.pipeline import chain, stages
from elastic3d.parallel.pipeline.absent import blank_of, filled
from elastic3d.parallel.randomness import Randomness
from elastic3d.values import Layout
from tests.parallel.architectures import families

WORDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
TARGET = WORDS.roll(-1, 1)
CPU = torch.device("cpu")
MASKED = {"input_ids": WORDS, "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])}
LABELLED = {"input_ids": WORDS, "labels": WORDS}


def loss_of(output: Any) -> torch.Tensor:
    return families.logits_loss(output, TARGET) if output.loss is None else output.loss


def whole(family: str, given: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of one rank."""
    build, path = families.FAMILIES[family]
    model: Any = initial.whole(build, 3).train()
    randomness = Randomness(5, CpuDevice())
    (part,) = stages.cut(model, path, Layout(pp=1, dp=1), 0)
    randomness.install(model, part.blocks)
    loss = loss_of(chain.Caller(model)(model, given))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def staged(family: str, given: Any, count: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of stages, one after the other, and then back."""
    build, path = families.FAMILIES[family]
    proof = chain.prove(initial.whole(build, 3), path, given)
    passed: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    models, output, arrived = [], None, None
    for rank in range(count):
        model = initial.whole(build, 3).train()
        layout = Layout(pp=count, dp=1)
        (part,) = stages.cut(model, path, layout, rank)
        stages.cut_further(model, path, proof.early, proof.late, [part])
        stages.dress(part, proof.activation, proof.early, proof.templates, CPU)
        Randomness(5, CpuDevice()).install(model, part.blocks)
        mine = given if part.first or proof.frame.everywhere else filled(blank_of(given), CPU)
        output = proof.frame.run(model, mine, arrived)
        models.append(model)
        passed.append((output if isinstance(output, torch.Tensor) else loss_of(output), arrived))
        if not part.last:
            arrived = passed[-1][0].detach().requires_grad_()
    gradient = None
    for made, came in reversed(passed):
        made.backward(gradient)  # type: ignore[no-untyped-call]
        gradient = None if came is None else came.grad
    held = [pair for model in models for pair in model.named_parameters()]
    return passed[-1][0].detach(), {name: p.grad for name, p in held if p.grad is not None}


@pytest.mark.parametrize("family", sorted(families.FAMILIES))
@pytest.mark.parametrize("given", [WORDS, MASKED, LABELLED], ids=["words", "masked", "labelled"])
def test_stages_have_the_bits_of_the_whole(family: str, given: Any) -> None:
    """With dropout, on plain words, with a mask, and with the loss that the model computes from labels."""
    loss, gradients = whole(family, given)
    for count in (2, 3):
        other, others = staged(family, given, count)
        assert torch.equal(loss, other)
        assert others.keys() == gradients.keys()
        assert all(torch.equal(gradients[name], others[name]) for name in gradients)
