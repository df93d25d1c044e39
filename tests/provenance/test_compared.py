"""Nodes compare what their models are made of, beyond shapes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from elastic3d.provenance import compared

SCRIPT = """
import sys
import layers, unused_here
sys.path.insert(0, "{other}")
import stranger
from elastic3d.provenance import compared
print(compared.digest_of(layers.Block()))
"""
LAYERS = """
from torch import nn
class Block(nn.Linear):
    def __init__(self): super().__init__(2, 2)
"""


def digest(folder: Path) -> str:
    command = [sys.executable, str(folder / "train.py")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_what_a_script_imports_from_its_folder_counts_wherever_the_folder_is(tmp_path: Path) -> None:
    """What is not imported may differ, and what is from somewhere else."""
    one, other = tmp_path / "node0" / "code", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir(parents=True)
    (one / "train.py").write_text(SCRIPT.format(other=other))
    (one / "layers.py").write_text(LAYERS)
    for file in (one / "unused_here.py", one / "not_imported.py", other / "stranger.py"):
        file.write_text("")
    two = Path(shutil.copytree(one, tmp_path / "node1" / "elsewhere"))
    (two / "not_imported.py").write_text("# differs")
    assert digest(one) == digest(two) != ""
    (other / "stranger.py").write_text("# differs")
    assert digest(one) == digest(two)
    (two / "layers.py").write_text(LAYERS + "# differs")
    assert digest(one) != digest(two)


class Printed(nn.Module):
    """A model that prints where it is in memory."""

    def extra_repr(self) -> str:
        return f"at {hex(id(self))}"


def test_how_a_model_is_made_counts_and_not_where_it_is() -> None:
    def model(eps: float = 1e-5, drop: float = 0.1) -> nn.Module:
        return nn.Sequential(nn.LayerNorm(4, eps=eps), nn.Dropout(drop), Printed())

    assert compared.digest_of(model()) == compared.digest_of(model())
    assert len({compared.digest_of(one) for one in (model(), model(eps=1e-6), model(drop=0.2))}) == 3


def test_a_configuration_counts_and_the_version_of_a_models_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which shapes say nothing; but not where it was loaded from."""
    transformers = pytest.importorskip("transformers")

    def model(theta: float, folder: str) -> nn.Module:
        config = transformers.LlamaConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8
        )
        config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
        config._name_or_path = folder
        return transformers.LlamaForCausalLM(config)

    first = compared.digest_of(model(1e4, "/here"))
    assert first == compared.digest_of(model(1e4, "/there")) != compared.digest_of(model(5e5, "/here"))
    monkeypatch.setattr(compared.metadata, "version", lambda package: "another")
    assert first != compared.digest_of(model(1e4, "/here"))
