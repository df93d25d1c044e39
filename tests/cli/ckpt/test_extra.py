"""What a script has kept of its own is seen beside the model, and exported by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from checkpointing import Store, TensorSpec, commit, fence, open_store, save_rank
from elastic3d.cli.ckpt import app
from elastic3d.planner.shares import MeshSizes, boxes_of, find_homes, parameter_of
from tests.cli.ckpt import scenes

run = CliRunner()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint whose script has kept an average of the model, and a table."""
    folder = tmp_path_factory.mktemp("averaged")
    store: Store = open_store(str(folder))
    fence(store, 1)
    made = {spec: data for spec, data in scenes.state(1).items() if spec.key.startswith("model/")}
    for spec, data in list(made.items()):
        key = spec.key.replace("model/", "extra/ema/module.")
        made[TensorSpec(key=key, dtype=spec.dtype, shape=spec.shape)] = data
    made[TensorSpec(key="extra/table/rows/a%2Fb", dtype="int64", shape=())] = (7).to_bytes(8, "little")
    extra = {"ema": {"kind": "AveragedModel", "state": None}, "table": {"kind": "Table", "state": {"dict": []}}}
    facts = {**scenes.facts(1), "extra": extra}
    pieces = list(scenes.pieces(made, 0, MeshSizes()))
    save_rank(store, step=1, made_in=1, attempt=0, rank=0, world=1, pieces=pieces, facts=facts)
    commit(store, step=1, made_in=1, attempt=0, committed_in=1, world=1)
    return str(folder)


def test_show_and_tree_name_what_is_kept(url: str) -> None:
    """By the names that the script gave, with their classes."""
    shown = run.invoke(app, ["show", url, "latest"]).stdout
    assert "ema (AveragedModel), table (Table)" in shown
    tree = run.invoke(app, ["tree", url, "latest", "--match", "extra/*", "--all"]).stdout
    assert "ema" in tree
    assert "table" in tree


def test_an_average_is_exported_under_the_models_own_names(url: str, tmp_path: Path) -> None:
    """And the model without it."""
    for prefix in ("extra/ema/module.", "model/"):
        target = tmp_path / f"{prefix[:5]}.pt"
        assert run.invoke(app, ["export", url, str(target), "--prefix", prefix]).exit_code == 0
        names = {spec.key.removeprefix("model/") for spec in scenes.state(1) if spec.key.startswith("model/")}
        assert set(torch.load(target, weights_only=True)) == names


def test_an_average_is_planned_where_its_model_is() -> None:
    """Its tensors are cut as the model's, and those of a block go to the block's stage."""
    assert parameter_of("extra/ema/module.blocks.3.mlp.weight") == "blocks.3.mlp.weight"
    assert parameter_of("extra/own/shadow/head.weight") == "head.weight"
    specs = [spec for spec in scenes.state(1) if spec.key.startswith("model/")]
    both = [
        *specs,
        *(TensorSpec(key=f"extra/ema/module.{parameter_of(s.key)}", dtype=s.dtype, shape=s.shape) for s in specs),
    ]
    homes = find_homes(both, last=scenes.LAST)
    assert (homes.blocks, homes.count) == ("blocks", scenes.BLOCKS)
    target = MeshSizes(pp=2, dp=2)
    for rank in range(target.world):
        held = {(spec.key, box) for spec, box in boxes_of(both, rank, target, homes, {})}
        model = {(key.removeprefix("model/"), box) for key, box in held if key.startswith("model/")}
        assert model == {(parameter_of(key), box) for key, box in held if key.startswith("extra/")}
