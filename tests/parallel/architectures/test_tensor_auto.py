from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from elastic3d.parallel.initial import outline
from elastic3d.parallel.tensor.foreign import own_plan
from elastic3d.parallel.tensor.proof import prove
from elastic3d.parallel.tensor.styles import scheme_of
from elastic3d.values import Layout
from tests.parallel.architectures import tensor_mains
from tests.parallel.worlds import Orders, run_world

pytestmark = [pytest.mark.gloo, pytest.mark.long]


def result(main: Callable[..., Any], layout: str) -> Any:
    reports = run_world(main, Orders(layout=Layout.parse(layout)))
    for report in reports:
        assert report.ended == "done", report.error
    assert {repr(report.result) for report in reports} == {repr(reports[0].result)}
    return reports[0].result


@pytest.mark.parametrize(
    ("main", "other"),
    [(tensor_mains.train_qwen3, "pp=2,dp=1,tp=2"), (tensor_mains.train_llama, "pp=1,dp=2,tp=2")],
    ids=["qwen3", "tied llama"],
)
def test_a_models_own_tensor_plan_trains_like_one_rank(main: Callable[..., Any], other: str) -> None:
    """Losses and norms of tp=2 equal those of one rank up to rounding; all layouts of one tp have one digest."""
    _, losses, norms = result(main, "pp=1,dp=1")
    parted = result(main, "pp=1,dp=1,tp=2")
    assert parted[1] == pytest.approx(losses, abs=1e-5)
    assert parted[2] == pytest.approx(norms, abs=1e-5)
    assert result(main, other) == parted


def even_neox() -> nn.Module:
    """Makes queries, keys and values in one layer, head by head."""
    return GPTNeoXForCausalLM(GPTNeoXConfig(**tensor_mains.EVEN))


@pytest.mark.parametrize(
    ("family", "path"),
    [(tensor_mains.llama, "model.layers"), (tensor_mains.qwen3, "model.layers"), (even_neox, "gpt_neox.layers")],
)
def test_a_models_own_tensor_plan_is_proved_before_anything_is_cut(family: Callable[[], nn.Module], path: str) -> None:
    """Its blocks run by themselves, with the positions, masks and grouped heads the model makes."""
    model = outline(family)
    scheme = scheme_of(model, own_plan(model))
    assert prove(model, path, torch.zeros(2, 40, dtype=torch.int64), scheme) == (f"{path}.0",)
