"""`elastic3d ckpt export --to hf`: what a run has trained, as transformers loads it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from elastic3d.cli.ckpt import app
from elastic3d.values import Layout
from tests.parallel.architectures.families import FAMILIES, SIZES, logits_loss
from tests.parallel.models import Model
from tests.training import stored
from tests.training.stored import Tensors

run = CliRunner()
trained = partial(stored.trained, loss=logits_loss)

TIED = LlamaConfig(**{**SIZES, "tie_word_embeddings": True})


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """A store, and the tensors of the llama in it."""
    folder = tmp_path_factory.mktemp("llama")
    return folder / "store", trained(folder, FAMILIES["llama"][0])


def export(store: Path, out: Path, *options: str) -> Any:
    result = run.invoke(app, ["export", str(store), str(out), "--to", "hf", *options, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def said(*arguments: str) -> tuple[int, str]:
    result = run.invoke(app, ["export", *arguments])
    assert result.stderr.count("\n") == 1, result.output
    return result.exit_code, result.stderr


def same(out: Path, tensors: Tensors) -> Any:
    """Load the folder and compare; return the model."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    model, info = loaded
    wrong = [name for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in info[kind]]
    assert not wrong
    state = model.state_dict()
    assert tensors.keys() <= state.keys()
    for name, value in tensors.items():
        assert state[name].dtype == value.dtype, name
        assert torch.equal(state[name], value), name
    return model


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"wide_llama"}))
def test_a_trained_model_is_loaded_by_transformers(family: str, tmp_path: Path) -> None:
    """Every tested family: its class, its configuration, and each tensor to the last bit, from the checkpoint alone.

    Files have the names, and the experts one by one, that transformers itself writes.
    """
    build, blocks = FAMILIES[family]
    tensors = trained(tmp_path, build, blocks)
    done = export(tmp_path / "store", tmp_path / "out")
    model = same(tmp_path / "out", tensors)
    assert type(model).__name__ == type(build()).__name__
    model.save_pretrained(tmp_path / "theirs")
    assert done["tensors"] == len(names(tmp_path / "theirs"))
    assert names(tmp_path / "out") == names(tmp_path / "theirs")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        file.name for file in (tmp_path / "theirs").iterdir()
    }


def names(folder: Path) -> set[str]:
    """Return the tensors of the only file of a folder."""
    data = (folder / "model.safetensors").read_bytes()
    return set(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])) - {"__metadata__"}


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    """And are tied again when they are loaded."""
    tensors = trained(tmp_path, partial(LlamaForCausalLM, TIED), "model.layers")
    export(tmp_path / "store", tmp_path / "out")
    assert "lm_head.weight" not in names(tmp_path / "out")
    model = same(tmp_path / "out", tensors)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.gloo
@pytest.mark.long
def test_a_model_that_was_sharded_keeps_its_class(tmp_path: Path) -> None:
    """torch makes another one of it; over fp32 masters the folder has fp32, whatever the model was built in."""
    build = partial(_in_bf16, FAMILIES["llama"][0])
    layout = Layout(pp=1, dp=2)
    tensors = trained(tmp_path, build, "model.layers", layout=layout, precision="bf16")
    export(tmp_path / "store", tmp_path / "out")
    assert {value.dtype for value in tensors.values()} == {torch.float32}
    assert type(same(tmp_path / "out", tensors)) is LlamaForCausalLM


@pytest.mark.gloo
@pytest.mark.long
def test_a_model_that_was_trained_in_stages_is_whole(tmp_path: Path) -> None:
    """No rank had all of it, and some had other parts of one tensor."""
    tensors = trained(tmp_path, FAMILIES["mixtral"][0], "model.layers", layout=Layout(pp=2, dp=2))
    export(tmp_path / "store", tmp_path / "out")
    same(tmp_path / "out", tensors)


def _in_bf16(build: Any) -> nn.Module:
    model: Any = build().to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    whole: nn.Module = model
    return whole


def test_large_models_are_written_in_shards(llama: tuple[Path, Tensors], tmp_path: Path) -> None:
    """With the index that says which file has which tensor; a tensor that is larger has a file of its own."""
    export(llama[0], tmp_path / "out", "--shard-size", "0.004MB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = {file.name for file in (tmp_path / "out").glob("*.safetensors")}
    assert len(files) > 3
    assert set(index["weight_map"].values()) == files
    assert index["metadata"]["total_size"] == sum(4 * value.numel() for value in llama[1].values())
    same(tmp_path / "out", llama[1])


def test_another_folder_may_describe_the_model(llama: tuple[Path, Tensors], tmp_path: Path) -> None:
    """Its configuration counts, and the tokenizer in it comes along; weights in it do not."""
    base = tmp_path / "base"
    model: Any = FAMILIES["llama"][0]()
    model.config.rope_parameters["rope_theta"] = 5e5
    model.save_pretrained(base)
    tokenizer = {"tokenizer.json", "sentencepiece.bpe.model", "additional_chat_templates/rag.jinja"}
    (base / "additional_chat_templates").mkdir()
    for name in (*tokenizer, "notes.txt"):
        (base / name).write_text("{}")
    export(llama[0], tmp_path / "out", "--config", str(base))
    assert same(tmp_path / "out", llama[1]).config.rope_parameters["rope_theta"] == 5e5
    files = {str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*") if file.is_file()}
    assert files == {"config.json", "generation_config.json", "model.safetensors", *tokenizer}


def test_tensors_of_another_model_are_named(llama: tuple[Path, Tensors], tmp_path: Path) -> None:
    """Those that are missing, that the model does not have, and that have another shape; nothing is written."""
    base = tmp_path / "base"
    LlamaConfig(**{**SIZES, "num_hidden_layers": 4, "intermediate_size": 25}, num_key_value_heads=1).save_pretrained(
        base
    )
    add_class(base, "LlamaForCausalLM")
    code, error = said(str(llama[0]), str(tmp_path / "out"), "--to", "hf", "--config", str(base))
    assert code == 2
    assert "the checkpoint lacks model.layers.3." in error
    assert "model.layers.0.mlp.gate_proj.weight, which is [24, 16] and should be [25, 16]" in error
    LlamaConfig(**{**SIZES, "num_hidden_layers": 2}, num_key_value_heads=1).save_pretrained(base)
    add_class(base, "LlamaForCausalLM")
    code, error = said(str(llama[0]), str(tmp_path / "out"), "--to", "hf", "--config", str(base))
    assert "the model has no model.layers.2." in error
    assert "--prefix" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


def add_class(folder: Path, name: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [name]}))


def test_what_cannot_describe_a_model_is_refused(llama: tuple[Path, Tensors], tmp_path: Path) -> None:
    """Each in one line, with what to do."""
    store, out = str(llama[0]), str(tmp_path / "out")
    folder = tmp_path / "folder"
    folder.mkdir()

    def with_config(content: str) -> str:
        (folder / "config.json").write_text(content)
        code, error = said(store, out, "--to", "hf", "--config", str(folder))
        assert code == 2, error
        return error

    assert "is no folder" in said(store, out, "--to", "hf", "--config", str(tmp_path / "none"))[1]
    assert "there is no config.json" in said(store, out, "--to", "hf", "--config", str(folder))[1]
    assert "is no JSON" in with_config("{")
    assert "is no object" in with_config("[]")
    assert "names no model_type" in with_config("{}")
    assert '"architectures" does not name' in with_config('{"model_type": "llama"}')
    assert "is not in transformers" in with_config('{"model_type": "llama", "architectures": ["Mine"]}')
    assert "is not in transformers" in with_config('{"model_type": "mine", "architectures": ["LlamaForCausalLM"]}')
    wrong = '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": "many"}'
    assert "cannot build it" in with_config(wrong)
    assert "has no tensor whose name begins with 'other/'" in said(store, out, "--to", "hf", "--prefix", "other/")[1]
    assert "goes with --to hf" in said(store, out, "--to", "dcp", "--config", str(folder))[1]
    assert "--shard-size" in said(store, out, "--to", "hf", "--shard-size", "many")[1]
    assert "writes a folder" in said(store, f"{out}.safetensors", "--to", "hf")[1]
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_model_of_ones_own_is_not_guessed(tmp_path: Path) -> None:
    """The checkpoint does not say what it is, so a folder has to."""
    stored.trained(tmp_path, Model)
    code, error = said(str(tmp_path / "store"), str(tmp_path / "out"), "--to", "hf")
    assert code == 2
    assert "--config FOLDER" in error
