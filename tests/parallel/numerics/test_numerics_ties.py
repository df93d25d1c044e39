from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from elastic3d.data import Batches
from elastic3d.errors import LayoutError, ModelError
from elastic3d.parallel.assembly import measure
from elastic3d.parallel.initial import outline
from elastic3d.parallel.numerics.ties import ties
from elastic3d.parallel.shard_request import ShardRequest
from elastic3d.planner import legal_layouts, plan
from elastic3d.planner.enumeration import Cluster
from elastic3d.planner.ranking import illegal
from elastic3d.training import run_alone
from elastic3d.values import Layout, ModelProfile, Schedule
from tests.parallel import numeric_mains as mains
from tests.parallel.models import Model, Sentences
from tests.parallel.worlds import Orders, run_world

pytestmark = [pytest.mark.gloo, pytest.mark.long]


def results(main: Any, *shapes: tuple[int, int], **orders: Any) -> list[Any]:
    """Return what every rank of every (dp, ZeRO stage) returned."""
    outcomes = []
    for dp, zero in shapes:
        for report in run_world(main, Orders(layout=Layout(pp=1, dp=dp, zero=zero), **orders)):
            assert report.ended == "done", report.error
            outcomes.append(report.result)
    return outcomes


@pytest.mark.parametrize("main", [mains.train_tied, mains.train_tied_bf16, mains.train_tied_large])
def test_tied_ends_train_to_one_digest(main: Any) -> None:
    """One tensor under two names is one parameter, whole or sharded, also if weights are filled in one by one."""
    outcomes = results(main, (1, 3), (2, 3), (3, 2))
    assert len({(r.digest, r.losses) for r in outcomes}) == 1
    assert {("embed.weight" in r.names, "head.weight" in r.names) for r in outcomes} == {(True, False)}


def test_a_tied_tensor_is_saved_once_and_restored_tied(tmp_path: Path) -> None:
    """Its state is under the first name; going on with other replicas ends with the digest of an undisturbed run."""
    whole = results(mains.train_tied, (1, 3))[0]
    first = Orders(layout=Layout(pp=1, dp=2), keep=tmp_path, leave_at=dict.fromkeys(range(2), 1))
    assert {report.ended for report in run_world(mains.train_tied, first)} == {"left"}
    assert {r.digest for r in results(mains.train_tied, (3, 2), take=tmp_path)} == {whole.digest}


def test_tied_tensors_in_two_stages_are_refused() -> None:
    """By name."""
    for report in run_world(mains.train_tied, Orders(layout=Layout(pp=2, dp=1))):
        assert "'embed.weight' and 'head.weight' are one tensor" in report.error


def test_the_planner_uses_no_stages_with_tied_tensors() -> None:
    """The profile reports the tie."""
    asked = ShardRequest(build=mains.TiedPlain, blocks="blocks", seed=0, reduction="ordered", whole_below=0)
    batches = Batches(Sentences(), global_batch=8, micro_batch=2, seed=0)
    profile, _ = measure(asked, outline(mains.TiedPlain), batches)
    assert profile.tied
    assert [layout.pp for layout in legal_layouts(4, profile, Layout())] == [1]
    with pytest.raises(LayoutError):
        plan(2, 1, profile, Layout(pp=2))


def test_the_planner_excludes_schedules_without_selective_recomputation() -> None:
    """Those that split the backward pass; full recomputation allows them."""
    zbv = Layout(pp=2, dp=1, zero=2, schedule=Schedule.ZBV, virtual=2)
    profile = ModelProfile(blocks=4, parameters=1, micro_batches=8, micro_batch=1, digest="", recompute="selective")
    cluster = Cluster(nodes=2, slots=1)
    assert 'recompute="selective" cannot follow' in (illegal(zbv, cluster, profile) or "")
    assert illegal(zbv, cluster, replace(profile, recompute="full")) is None


def test_a_tie_across_blocks_is_refused() -> None:
    """Blocks are sharded separately; within one block, or without blocks, a tie is fine."""

    def across() -> nn.Module:
        model = Model()
        model.blocks[1].up.weight = model.blocks[0].up.weight
        return model

    with pytest.raises(ModelError, match=r"'blocks.0.up.weight' and 'blocks.1.up.weight' are one tensor"):
        run_alone(lambda run: run.shard(across, blocks="blocks"))  # type: ignore[arg-type, return-value]
    run_alone(lambda run: run.shard(across))  # type: ignore[arg-type, return-value]

    def within() -> nn.Module:
        model = Model()
        model.blocks[1].norm.bias = model.blocks[1].down.bias
        return model

    run_alone(lambda run: run.shard(within, blocks="blocks"))  # type: ignore[arg-type, return-value]
    assert ties(within()) == [("blocks.1.norm.bias", "blocks.1.down.bias")]
