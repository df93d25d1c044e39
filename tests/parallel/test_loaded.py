"""Weights loaded by a large model's `build` are not silently thrown away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from elastic3d.errors import ModelError
from elastic3d.parallel import initial
from elastic3d.training import Run
from elastic3d.training.standalone import StandalonePort


class Net(nn.Module):
    """Two blocks and a head whose initial values come from a table, in its own initialiser."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 4, bias=False)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if module is getattr(self, "head", None):
            with torch.no_grad():
                module.weight.copy_(torch.eye(4))


SAVED = {name: torch.ones_like(value) for name, value in Net().state_dict().items()}


def copied() -> nn.Module:
    model = Net()
    model.load_state_dict(SAVED)
    return model


def assigned() -> nn.Module:
    model = Net()
    model.load_state_dict(SAVED, assign=True)
    return model


def by_hand() -> nn.Module:
    model = Net()
    model.blocks[1].weight.data.copy_(torch.ones(4, 4))
    return model


def from_pretrained(folder: Path) -> Callable[[], nn.Module]:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16, n_positions=8)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return lambda: transformers.GPT2LMHeadModel.from_pretrained(folder)


@pytest.mark.parametrize("build", [copied, assigned, by_hand])
def test_loaded_weights_are_refused_above_the_bound_and_kept_below(build: Callable[[], nn.Module]) -> None:
    """Before anybody joins: the measuring trainer says which bound to raise, and why."""
    port = StandalonePort()
    port.assignment = replace(port.assignment, measuring=True)
    with pytest.raises(ModelError, match=r"whole_below=1 << 30"):
        Run(port).shard(build, whole_below=0)
    with pytest.raises(ModelError, match=r"loads weights"):
        Run(StandalonePort()).shard(build, whole_below=0)
    assert torch.equal(Run(StandalonePort()).shard(build).blocks[1].weight, torch.ones(4, 4))


def test_a_pretrained_transformers_model_is_refused_above_the_bound(tmp_path: Path) -> None:
    """`from_pretrained` replaces the parameters that the model was made with."""
    with pytest.raises(ModelError, match=r"loads weights"):
        initial.skeleton(from_pretrained(tmp_path))


def test_values_computed_by_initialisation_are_accepted() -> None:
    """They are computed again when the module is filled, so nothing is lost."""
    model = Run(StandalonePort()).shard(Net, blocks="blocks", whole_below=0)
    assert torch.equal(model.head.weight, torch.eye(4))
