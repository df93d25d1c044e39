"""Weights that exist, and adapters over them, in layouts of real ranks: each reads its part, and bits are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic3d.values import Layout
from tests.parallel.architectures import weights_mains as mains
from tests.parallel.architectures.families import FAMILIES, wide_llama
from tests.parallel.worlds import Orders, Report, run_world

pytestmark = [pytest.mark.gloo, pytest.mark.long]


def world(main: Callable[..., Any], layout: str, **orders: Any) -> list[Report]:
    reports = run_world(main, Orders(layout=Layout.parse(layout), **orders))
    assert {report.ended for report in reports} <= {"done", "left"}, "\n".join(report.error for report in reports)
    return reports


def seen(reports: list[Report], what: str) -> Any:
    assert len({repr(report.result[what]) for report in reports}) == 1
    return reports[0].result[what]


def read_by(reports: list[Report]) -> list[int]:
    return [report.result["read"] for report in reports]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    mains.saved(wide_llama, tmp_path / "llama")
    return tmp_path / "llama"


def test_each_rank_reads_its_part_and_all_layouts_have_one_digest(folder: Path) -> None:
    """Stages and shards together read each byte once; what was begun with is what one rank begins with."""
    main = mains.family("wide_llama", folder)
    alone = world(main, "pp=1,dp=1")
    whole = read_by(alone)[0]
    for layout in ("pp=2,dp=1", "pp=1,dp=2,zero=3"):
        reports = world(main, layout)
        assert seen(reports, "first") == seen(alone, "first")
        assert seen(reports, "digest") == seen(alone, "digest")
        assert sum(read_by(reports)) == whole
        assert max(read_by(reports)) < 0.6 * whole


def test_parts_of_layers_are_read_too(folder: Path) -> None:
    """With tp the values are the same before the first step."""
    alone, parted = world(mains.family("wide_llama", folder, steps=0), "pp=1,dp=1"), []
    parted = world(mains.family("wide_llama", folder, steps=0, tensor="auto"), "pp=1,dp=1,tp=2")
    assert seen(parted, "first") == seen(alone, "first")
    assert max(read_by(parted)) < 0.7 * read_by(alone)[0]


def test_adapters_have_one_digest_in_every_layout_and_survive_a_change(folder: Path, tmp_path: Path) -> None:
    """What is frozen is in no optimizer; a run that is left goes on in another layout with the same bits."""
    main = mains.adapters(folder)
    reports = world(main, "pp=2,dp=1")
    assert read_by(reports) != [0, 0]
    assert {report.result["held"] for report in reports} == {8}
    expected = seen(reports, "digest")
    (tmp_path / "kept").mkdir()
    left = world(main, "pp=1,dp=2,zero=3", keep=tmp_path / "kept", leave_at={0: 0, 1: 0}, snapshot_every=1)
    assert {report.ended for report in left} == {"left"}
    after = world(main, "pp=1,dp=1", take=tmp_path / "kept")
    assert (after[0].restored or ("",))[0] == "memory"
    assert seen(after, "digest") == expected
    assert read_by(after) == [0]


def test_adapted_layers_are_cut_by_the_models_own_plan(folder: Path) -> None:
    """Losses are those of one rank up to rounding, and each rank has a part of the layers."""
    alone, parted = (
        world(mains.adapters(folder, steps=3, **options), layout)
        for options, layout in (({}, "pp=1,dp=1"), ({"tensor": "auto"}, "pp=1,dp=1,tp=2"))
    )
    assert seen(parted, "first") == seen(alone, "first")
    assert seen(parted, "losses") == pytest.approx(seen(alone, "losses"), abs=1e-5)
    assert max(read_by(parted)) < 0.7 * read_by(alone)[0]


def test_adapters_with_dropout_are_not_cut(folder: Path) -> None:
    """Each rank would drop other features; the error names the module, and what would work."""
    main = mains.adapters(folder, tensor="auto", lora={"lora_dropout": 0.1})
    reports = run_world(main, Orders(layout=Layout(pp=1, dp=1), measuring=True))
    assert "self_attn.q_proj' is adapted by peft and cannot be cut" in reports[0].error
    assert "lora_dropout=0" in reports[0].error


def test_nodes_with_other_weights_are_named(folder: Path, tmp_path: Path) -> None:
    """A rank whose folder has other bytes under the same path would train another model."""
    mains.saved(lambda: FAMILIES["wide_llama"][0](), tmp_path / "other", more=1)
    reports = run_world(mains.elsewhere(folder, tmp_path / "other"), Orders(layout=Layout(pp=1, dp=2)))
    assert all("of rank 1 are others than on the node of rank 0" in report.error for report in reports)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox", "mixtral"])
def test_every_family_begins_alike_in_many_layouts(family: str, tmp_path: Path) -> None:
    """The sweep."""
    mains.saved(FAMILIES[family][0], tmp_path / "saved")
    main = mains.family(family, tmp_path / "saved")
    expected = seen(world(main, "pp=1,dp=1"), "digest")
    for layout in ("pp=2,dp=1", "pp=1,dp=2,zero=3", "pp=1,dp=2,zero=1", "pp=3,dp=1", "pp=2,dp=2,zero=2"):
        assert seen(world(main, layout), "digest") == expected


@pytest.mark.slow
def test_adapters_have_one_digest_in_many_layouts(folder: Path) -> None:
    """ZeRO-1 to 3, stages, replicas, and tp with each."""
    for tp, layouts in {
        1: ["pp=1,dp=1", "pp=1,dp=2,zero=1", "pp=1,dp=2,zero=2", "pp=2,dp=2,zero=3", "pp=1,dp=2,replicas=2"],
        2: ["pp=1,dp=1,tp=2", "pp=1,dp=2,tp=2", "pp=2,dp=1,tp=2"],
    }.items():
        main = mains.adapters(folder, **({"tensor": "auto"} if tp > 1 else {}))
        assert len({seen(world(main, layout), "digest") for layout in layouts}) == 1
