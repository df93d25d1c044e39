"""Unchanged models of transformers over stages and replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elastic3d.data.positions import Order
from elastic3d.values import Layout, Schedule
from tests.parallel.architectures import families
from tests.parallel.models import Sentences
from tests.parallel.worlds import Orders, Report, run_world

pytestmark = [pytest.mark.gloo, pytest.mark.long]


def trained(family: str, layout: Layout, **options: Any) -> list[Report]:
    reports = run_world(families.trainer(family, **options), Orders(layout=layout))
    assert {report.ended for report in reports} == {"done"}, "\n".join(report.error for report in reports)
    return reports


def same_for_all(family: str, layouts: list[Layout], **options: Any) -> Report:
    """Return the report of the smallest layout after checking that every layout ends with its digest and losses."""
    alone = trained(family, Layout(pp=1, dp=1, tp=layouts[0].tp), **options)[0]
    for layout in layouts:
        for report in trained(family, layout, **options):
            assert report.result == alone.result, (family, layout)
    return alone


def plain_losses(build: Any) -> list[float]:
    """Return the losses of the loop that a user of transformers and plain torch writes."""
    order = Order(length=len(Sentences()), global_batch=8, micro_batch=2, seed=11)
    torch.manual_seed(3)
    model: Any = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(families.STEPS):
        total = 0.0
        for j in range(order.micro_batches):
            pairs = [Sentences()[i] for i in order.micro_batch_samples(step, j)]
            tokens, target = (torch.stack(column) for column in zip(*pairs, strict=True))
            loss = families.logits_loss(model(input_ids=tokens), target) / order.micro_batches
            loss.backward()
            total += float(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def test_llama_has_one_digest_and_the_losses_of_a_plain_loop() -> None:
    """Stages, replicas and both ZeRO stages change no bit, and the losses are those of transformers alone."""
    alone = same_for_all("llama", [Layout(pp=2, dp=1), Layout(pp=2, dp=2), Layout(pp=1, dp=2, zero=2)])
    assert alone.result[1] == pytest.approx(plain_losses(families.llama), abs=1e-5)


def test_qwen_has_one_digest() -> None:
    """Norms on queries and keys and biases on projections make no difference."""
    alone = same_for_all("qwen3", [Layout(pp=2, dp=2)])
    assert alone.result[1] == pytest.approx(plain_losses(families.qwen3), abs=1e-5)


def test_gpt_neox_with_dropout_has_one_digest() -> None:
    """Dropout after the embedding, in attention and in the blocks is keyed by place."""
    same_for_all("gpt_neox", [Layout(pp=3, dp=1)])


@pytest.mark.parametrize("family", ["gpt2", "bloom"])
def test_code_around_the_blocks_leaves_one_digest(family: str) -> None:
    """Positions and dropout before the blocks, and blocks that return more than their tensor."""
    same_for_all(family, [Layout(pp=2, dp=2)])


def test_masks_from_the_input_reach_every_stage() -> None:
    """An attention mask in a dictionary beside the tokens is available on all stages."""
    same_for_all("llama", [Layout(pp=2, dp=1)], masked=True)


def test_a_llama_filled_module_by_module_begins_alike_everywhere() -> None:
    """Built on meta because it is too large to be built whole, it has one digest too."""
    alone = same_for_all("llama", [Layout(pp=2, dp=1)], whole_below=0)
    assert alone.result[0] != trained("llama", Layout(pp=1, dp=1))[0].result[0]


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_every_family_has_one_digest_in_many_layouts(family: str) -> None:
    """The sweep."""
    sizes = [(1, 2, 2), (1, 3, 3), (2, 1, 3), (2, 2, 2), (3, 1, 3)]
    same_for_all(family, [Layout(pp=pp, dp=dp, zero=zero) for pp, dp, zero in sizes])


@pytest.mark.slow
def test_a_llama_trains_in_every_way() -> None:
    """Schedules with several stages a rank, other precisions, recomputation, and the model's own tensor plan."""
    folded = Layout(pp=2, dp=1, virtual=2, zero=2, schedule=Schedule.ZBV)
    interleaved = Layout(pp=2, dp=1, virtual=2, schedule=Schedule.INTERLEAVED)
    plain = same_for_all("wide_llama", [interleaved, folded])
    assert same_for_all("wide_llama", [Layout(pp=2, dp=2)], recompute="full").result == plain.result
    same_for_all("wide_llama", [Layout(pp=2, dp=2)], precision="bf16")
    same_for_all("wide_llama", [Layout(pp=2, dp=1, tp=2), Layout(pp=1, dp=2, tp=2)], tensor="auto")
