"""Adapters of peft in checkpoints: the rest is stored once, and they are written alone as peft loads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from typer.testing import CliRunner

from elastic3d.cli.ckpt import app
from tests.parallel.architectures.families import llama
from tests.parallel.architectures.weights_mains import adapted, saved
from tests.pretrained.beginning import begin, values

BLOCKS = "base_model.model.model.layers"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saved(llama, tmp_path / "llama")
    return tmp_path / "llama"


def ckpt(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_frozen_parameters_are_not_in_the_optimizer_and_are_stored_once(folder: Path, tmp_path: Path) -> None:
    """Equal bits after training, and no byte of them in a second checkpoint."""
    host, model = begin(adapted_llama, folder, steps=2, store=tmp_path / "store", blocks=BLOCKS)
    first, second = host.saved[-2:]
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    trained = sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    _, fresh = begin(adapted_llama, folder, blocks=BLOCKS)
    assert all(torch.equal(p, fresh.get_parameter(name)) for name, p in frozen.items())
    assert not any(torch.equal(p, fresh.get_parameter(n)) for n, p in model.named_parameters() if ".lora_B." in n)
    # Weights and two moments of the trained ones; the count of steps is the same for all of them, and stored once.
    assert second.written == 3 * trained + 4
    assert first.written >= trained + sum(p.numel() * 4 for p in frozen.values())


def adapted_llama() -> nn.Module:
    return adapted(llama)


def adapted_with_head() -> nn.Module:
    return adapted(llama, modules_to_save=["lm_head"])


def adapted_with_biases() -> nn.Module:
    from tests.parallel.architectures.families import qwen2

    return adapted(qwen2, bias="all")


def adapted_with_tokens() -> nn.Module:
    return adapted(llama, trainable_token_indices=[1, 2, 3])


@pytest.mark.parametrize("build", [adapted_llama, adapted_with_head, adapted_with_biases, adapted_with_tokens])
def test_adapters_alone_are_loaded_by_peft(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    """Over the same base they compute what the trained model does."""
    from tests.parallel.architectures.families import qwen2

    base = qwen2 if build is adapted_with_biases else llama
    saved(base, tmp_path / "base")
    # With trained tokens weights are refused: their initial values are computed from them.
    weights = None if build is adapted_with_tokens else tmp_path / "base"
    _, model = begin(build, weights, steps=2, store=tmp_path / "store", blocks=BLOCKS)
    said = ckpt("adapters", str(tmp_path / "store"), str(tmp_path / "out"))
    assert "1 adapter" in " ".join(said.split())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    plain: Any = base()
    loaded = PeftModel.from_pretrained(plain.from_pretrained(tmp_path / "base"), str(tmp_path / "out"))
    theirs = loaded.state_dict()
    compared = values(model)
    if weights is None:
        compared = {name: compared[name] for name, p in model.named_parameters() if p.requires_grad}
        assert any(".trainable_tokens_delta." in name for name in compared)
    assert all(torch.equal(theirs[name], value) for name, value in compared.items())
    # Written by peft itself, the files have the same names.
    model.save_pretrained(tmp_path / "peft")  # type: ignore[operator]
    from safetensors import safe_open

    names = [set(safe_open(tmp_path / x / "adapter_model.safetensors", "pt").keys()) for x in ("out", "peft")]
    assert names[0] == names[1]


def test_an_adapter_with_a_name_is_in_a_folder_of_its_own(folder: Path, tmp_path: Path) -> None:
    """As peft writes it."""

    def build() -> nn.Module:
        model: Any = adapted(llama)
        config = model.peft_config["default"]
        model.add_adapter("second", config)
        return model  # type: ignore[no-any-return]

    begin(build, folder, steps=1, store=tmp_path / "store", blocks=BLOCKS)
    data = json.loads(ckpt("adapters", str(tmp_path / "store"), str(tmp_path / "out"), "--json"))
    assert data["kind"] == "peft"
    assert (tmp_path / "out" / "second" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "out" / "adapter_config.json").is_file()


def test_a_checkpoint_without_adapters_is_refused_and_nothing_is_left(folder: Path, tmp_path: Path) -> None:
    """The error names what writes whole models."""
    begin(llama, folder, steps=1, store=tmp_path / "store")
    result = CliRunner().invoke(app, ["adapters", str(tmp_path / "store"), str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "has no adapters of peft's" in result.output + result.stderr
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    ckpt("adapters", str(tmp_path / "store"), str(tmp_path / "out"), code=2)
