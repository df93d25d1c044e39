"""What may give other bits each time is named when a model is taken."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType

import pytest
import torch
from torch import nn

from elastic3d.parallel.refusals import OutsidePromise, look_at_kernels


class Configured(nn.Module):
    """As models of transformers say which attention they use."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        self.config = type("Config", (), {"_attn_implementation": attention})()


def test_a_plain_model_is_taken_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        look_at_kernels(nn.Sequential(nn.Linear(2, 2), nn.MultiheadAttention(2, 1), Configured("sdpa")))


def test_kernels_of_other_packages_are_named() -> None:
    """By their package, or by what a model of transformers was configured with."""
    foreign = type("FlashSelfAttention", (nn.Module,), {"__module__": "flash_attn.modules.mha"})
    with pytest.warns(OutsidePromise, match="module '1' .FlashSelfAttention of flash_attn."):
        look_at_kernels(nn.Sequential(nn.Linear(2, 2), foreign()))
    with pytest.warns(OutsidePromise, match="attention 'flash_attention_2'"):
        look_at_kernels(Configured("flash_attention_2"))


def test_settings_that_choose_by_time_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with pytest.warns(OutsidePromise, match="cudnn.benchmark"):
        look_at_kernels(nn.Linear(2, 2))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    config = ModuleType("torch._inductor.config")
    config.max_autotune = True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch._inductor.config", config)
    with pytest.warns(OutsidePromise, match="max_autotune"):
        look_at_kernels(nn.Linear(2, 2))
