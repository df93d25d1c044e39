"""Models of transformers, unchanged, over stages and replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elastic3d.data.positions import Order
from elastic3d.values import Layout
from tests.models import families
from tests.parallel.models import Sentences
from tests.parallel.worlds import Orders, Report, run_world

pytestmark = pytest.mark.gloo


def trained(family: str, pp: int, dp: int, zero: int = 3, **options: Any) -> list[Report]:
    reports = run_world(families.trainer(family, **options), Orders(layout=Layout(pp=pp, dp=dp, zero=zero)))
    assert {report.ended for report in reports} == {"done"}, "\n".join(report.error for report in reports)
    return reports


def same_for_all(family: str, layouts: list[tuple[int, int, int]], **options: Any) -> Report:
    """Return the report of one process after checking that every layout ends with its digest and losses."""
    alone = trained(family, 1, 1, **options)[0]
    for pp, dp, zero in layouts:
        for report in trained(family, pp, dp, zero, **options):
            assert report.result[:2] == alone.result[:2], (family, pp, dp, zero)
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
    alone = same_for_all("llama", [(2, 1, 3), (2, 2, 3), (1, 2, 2)])
    assert alone.result[1] == pytest.approx(plain_losses(families.llama), abs=1e-5)


def test_qwen_has_one_digest() -> None:
    """Norms on queries and keys and biases on projections make no difference."""
    alone = same_for_all("qwen3", [(2, 2, 3)])
    assert alone.result[1] == pytest.approx(plain_losses(families.qwen3), abs=1e-5)


def test_gpt_neox_with_dropout_has_one_digest() -> None:
    """Dropout after the embedding, in attention and in the blocks is keyed by place."""
    same_for_all("gpt_neox", [(3, 1, 3)])


def test_masks_from_the_input_reach_every_stage() -> None:
    """An attention mask in a dictionary beside the words is there on all stages."""
    same_for_all("llama", [(2, 1, 3)], masked=True)


def test_a_llama_too_large_to_be_built_whole_begins_alike_everywhere() -> None:
    """Built on meta and filled module by module, it has one digest too."""
    alone = same_for_all("llama", [(2, 1, 3)], whole_below=0)
    assert alone.result[0] != trained("llama", 1, 1)[0].result[0]


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_every_family_over_many_layouts(family: str) -> None:
    """The sweep."""
    same_for_all(family, [(1, 2, 2), (1, 3, 3), (2, 1, 3), (2, 2, 2), (3, 1, 3), (3, 2, 3)])
