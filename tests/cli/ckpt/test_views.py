"""The views compute what is in the store: checked against numpy, torch, the resolver and plain counting."""

from __future__ import annotations

import dataclasses
import math
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpointing import Box, TensorSpec, open_checkpoint, resolve
from checkpointing.format.tiles import ITEMSIZE, overlapping, uncovered
from checkpointing.inspection.alike import gathered, ranges
from checkpointing.inspection.arrays import array, widened
from checkpointing.inspection.difference import Change, by_key, difference
from checkpointing.inspection.documents import CheckpointDocuments, find
from checkpointing.inspection.history import history as commits
from checkpointing.inspection.reads import TileIndex
from checkpointing.inspection.statistics import summarise as statistics
from checkpointing.inspection.statistics import together
from checkpointing.inspection.summary import lineage
from checkpointing.inspection.tree import tree
from checkpointing.inspection.usage import usage
from checkpointing.inspection.values import doubtful, to_read, value_differences
from checkpointing.inspection.writers import writers
from elastic3d.cli.ckpt.planning import homes_of, plan_reads
from elastic3d.errors import LayoutError
from elastic3d.planner.shares import MeshSizes, boxes_of, find_homes, parameter_of
from tests.cli.ckpt import scenes
from tests.cli.ckpt.conftest import History


def saved(history: History, place: int) -> CheckpointDocuments:
    return find(history.store, history.names[place])


@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
def test_bytes_of_any_dtype_are_read_as_torch_reads_them(dtype: str) -> None:
    """Every byte pattern of the small types and some of the others; types that numpy lacks are widened exactly."""
    data = bytes(range(256)) if dtype != "bool" else bytes([0, 1] * 8)
    kind = getattr(torch, dtype)
    seen = torch.frombuffer(bytearray(data), dtype=kind)
    if dtype == "complex32":
        seen = torch.view_as_complex(torch.view_as_real(seen).to(torch.float32))
    elif dtype == "float4_e2m1fn_x2":
        seen = seen.view(torch.uint8)
    elif widened(dtype) is not None:
        seen = seen.to(torch.float32)
    np.testing.assert_array_equal(array(dtype, data), seen.numpy())


def test_statistics_match_the_values(history: History) -> None:
    """Merged from tiles and from several tensors, to the six digits that tiles have."""
    tiles = by_key(saved(history, 1).tiles)
    state = {spec.key: (spec, data) for spec, data in scenes.state(200).items()}
    several = []
    for key in ("model/blocks.0.mlp.weight", "model/blocks.1.mlp.weight"):
        spec, data = state[key]
        values = np.frombuffer(data, "<f4").astype("f8")
        stats = statistics(spec, tiles[key])
        assert stats.min == pytest.approx(values.min(), rel=1e-5)
        assert stats.max == pytest.approx(values.max(), rel=1e-5)
        assert stats.rms == pytest.approx(math.sqrt((values * values).mean()), rel=1e-5)
        assert (stats.nans, stats.sound) == (0, True)
        several.append((stats, values))
    both = np.concatenate([values for _, values in several])
    whole = together(stats for stats, _ in several)
    assert whole.rms == pytest.approx(math.sqrt((both * both).mean()), rel=1e-5)
    last = saved(history, 3)
    head = statistics(last.specs["model/head.weight"], by_key(last.tiles)["model/head.weight"])
    assert (head.nans, head.infinite, head.sound, head.max) == (1, True, False, math.inf)


def test_a_difference_names_the_changed_tensors(history: History) -> None:
    """By digests, everything but the frozen embedding; by how much, from statistics."""
    diff = difference(saved(history, 0), saved(history, 1))
    changes = {one.key: one for one in diff.tensors}
    assert [key for key, one in changes.items() if one.change is Change.SAME] == ["model/embed.weight"]
    weight = changes["model/blocks.2.mlp.weight"]
    assert (weight.tiles, weight.changed_tiles, weight.changed, weight.bytes) == (2, 2, 4096, 4096)
    assert weight.drift == pytest.approx(1.02 / 1.01 - 1, rel=1e-3)
    assert changes["model/embed.weight"].drift == 0
    assert [(fact.path, fact.before, fact.after) for fact in diff.facts][1:] == [("step", 100, 200)]
    assert diff.bytes - diff.changed == 64 * 16 * 2


def test_a_difference_to_another_model_tells_new_lost_and_reshaped_tensors_apart(history: History) -> None:
    """Tensors may be added, removed or of another shape."""
    one = saved(history, 0)
    specs = dict(one.specs)
    del specs["model/norm.weight"]
    specs["model/new"] = TensorSpec(key="model/new", dtype="float32", shape=(2, 2))
    specs["model/head.weight"] = TensorSpec(key="model/head.weight", dtype="float32", shape=(32, 32))
    other = dataclasses.replace(one, specs=specs)
    changes = {row.key: row.change for row in difference(one, other).tensors if row.change is not Change.SAME}
    assert changes == {
        "model/norm.weight": Change.REMOVED,
        "model/new": Change.ADDED,
        "model/head.weight": Change.RESHAPED,
    }


def test_values_are_compared_exactly_across_different_cuts(history: History) -> None:
    """Two meshes cut at different places: exact distances show an equal embedding, and how far the rest is apart."""
    old, new = saved(history, 1), saved(history, 2)
    diff = difference(old, new)
    assert {one.change for one in diff.tensors} == {Change.CHANGED, Change.RECUT}
    heard: list[int] = []
    sides = [(side, open_checkpoint(history.store, side.name)) for side in (old, new)]
    exact = {one.key: one for one in value_differences(sides[0], sides[1], doubtful(diff), heard.append)}
    assert sum(heard) == to_read(old, new, doubtful(diff)) > 0
    assert exact["model/embed.weight"].elements == 0
    before, after = scenes.state(200), scenes.state(300)
    for spec, data in before.items():
        if spec.dtype == "float32":
            one, other = np.frombuffer(data, "<f4").astype("f8"), np.frombuffer(after[spec], "<f4").astype("f8")
            assert exact[spec.key].max_abs == pytest.approx(np.abs(one - other).max(), rel=1e-12)
            assert exact[spec.key].rms == pytest.approx(np.sqrt(((one - other) ** 2).mean()), rel=1e-9)
            assert exact[spec.key].elements == (one != other).sum()


def test_a_nan_equals_only_a_nan(history: History) -> None:
    """A value that became NaN is infinitely far away; NaNs on both sides are no difference."""
    old, new = saved(history, 2), saved(history, 3)
    sides = [(side, open_checkpoint(history.store, side.name)) for side in (old, new)]
    key = ["model/head.weight"]
    (head,) = value_differences(sides[0], sides[1], key, lambda _: None)
    assert (head.max_abs, head.rms) == (math.inf, None)
    assert head.elements > 900
    assert next(value_differences(sides[1], sides[1], key, lambda _: None)).elements == 0


def test_usage_adds_up_to_the_stored_bytes(history: History) -> None:
    """The unique bytes, plus the shared ones once, are all that is stored."""
    everything = [saved(history, place) for place in (3, 2, 1, 0)]
    sizes = usage(everything, list(history.store.entries("")))
    for row in sizes.checkpoints:
        assert row.stored == row.unique + row.shared
        assert row.size == scenes.BYTES >= row.stored, "tiles that are equal are stored once"
    stored = {(tile.pack, tile.offset, tile.length) for one in everything for tile in one.tiles}
    embeddings = 2 * 64 * 16 * 2  # cut in two ways, each shared by two checkpoints
    assert sum(length for _, _, length in stored) == sum(row.unique for row in sizes.checkpoints) + embeddings
    assert (sizes.unreferenced, sizes.missing, sizes.other) == (0, 0, 0)
    alone = usage(everything[:1], list(history.store.entries("")))
    assert alone.checkpoints[0].shared == 0
    assert alone.unreferenced > 0
    assert alone.checkpoints[0].frees > sizes.checkpoints[0].frees
    assert usage(everything, [])  # a listing that lags behind is no error
    assert usage(everything, []).missing == len({pack for one in everything for pack in one.packs})


def test_usage_keeps_little_of_each_checkpoint(history: History) -> None:
    """A long run's manifests do not fit in memory together: of a tile no more is kept than where its bytes lie."""
    one = saved(history, 3)
    tile = dataclasses.replace(one.tiles[0], base=None)

    def checkpoints(number: int) -> Iterator[CheckpointDocuments]:
        for pack in range(number):
            own = dataclasses.replace(tile, pack=f"{pack:064x}", length=1)
            yield dataclasses.replace(
                one, tiles=tuple(dataclasses.replace(own, offset=offset << 20) for offset in range(2000))
            )

    def peak(number: int) -> int:
        tracemalloc.start()
        try:
            rows = usage(checkpoints(number), []).checkpoints
            assert [row.unique for row in rows] == [2000] * number
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(12) - peak(2) < 10 * 2000 * 40


def test_history_shows_what_each_commit_wrote(history: History) -> None:
    """An incremental save writes the changes and keeps the rest; after a recut, it says that digests cannot tell."""
    entries = list(commits(history.store, history.names[::-1], {}))
    assert [commit.step for commit in entries] == [400, 300, 200, 100]
    assert [commit.kept for commit in entries] == [2048, 0, 2048, 0]
    assert [commit.changed for commit in entries][2:] == [scenes.BYTES - 2048, None]
    assert [bool(commit.recut) for commit in entries] == [False, True, False, False]
    assert [commit.parent for commit in entries] == [*history.names[2::-1], None]
    (broken,) = list(commits(history.store, ["000000000007.00000001.0000.00000001"], {}))
    assert "no checkpoint" in broken.error


def test_lineage_follows_parents(history: History) -> None:
    """As far as they exist, and at most as far as asked for."""
    last = saved(history, 3)
    assert [one.checkpoint for one in lineage(history.store, last, 8)] == history.names[2::-1]
    assert len(lineage(history.store, last, 2)) == 2


def test_the_mesh_is_derived_from_the_tiles_each_rank_holds(history: History) -> None:
    """Two stages of two replicas; after the shrink one stage of three. Dim 0 is cut."""
    four, three = (writers(saved(history, place).ranks) for place in (0, 2))
    assert (four.stages, four.cuts, four.regular) == (((0, 1), (2, 3)), {0: 2}, True)
    assert (three.stages, three.cuts, three.regular) == (((0, 1, 2),), {0: 3}, True)
    assert sum(rank.bytes for rank in three.ranks) >= scenes.BYTES


def test_a_tree_folds_groups_with_the_same_contents() -> None:
    """Numbered groups with the same contents are one node, different ones stay separate, and sizes add up."""
    specs = [TensorSpec(key=f"model/h.{n}.w", dtype="float32", shape=(4, n // 9 + 1)) for n in range(11)]
    specs += [TensorSpec(key="model/h.out", dtype="int8", shape=(3,)), TensorSpec(key="x", dtype="int8", shape=(1,))]
    top = tree(specs)
    assert [(node.name, node.tensors) for node in top] == [("model/h", 12), ("x", 1)]
    assert [(node.name, node.alike) for node in top[0].children] == [("0..8", 9), ("9..10", 2), ("out", 1)]
    assert top[0].bytes == sum(spec.box.numel * spec.itemsize for spec in specs) - 1
    assert len(tree(specs, fold=False)[0].children) == 12


def test_names_that_differ_by_a_number_are_gathered() -> None:
    """Only those with something in common; the ranges say which numbers there are."""
    items = [("a.0.w", 1), ("a.1.w", 1), ("a.2.w", 2), ("a.3.w", 1), ("b", 1), ("a.x", 1)]
    assert [name for name, _ in gathered(items)] == ["a.{0..1,3}.w", "a.2.w", "b", "a.x"]
    assert ranges([1, 2, 3, 7, 9, 10]) == "1..3,7,9..10"


TARGETS = st.builds(MeshSizes, pp=st.integers(1, 4), dp=st.integers(1, 5), tp=st.integers(1, 3))


@settings(max_examples=30)
@given(TARGETS, st.booleans())
def test_the_ranks_of_any_mesh_hold_everything(target: MeshSizes, staged: bool) -> None:
    """Every element of every tensor is held; cut tensors are held once."""
    specs = list(scenes.state(1))
    homes = find_homes(specs, last=scenes.LAST) if staged else find_homes([specs[0]])
    shapes = {parameter_of(spec.key): spec.shape for spec in specs if spec.key.startswith("model/")}
    held: dict[TensorSpec, list[Box]] = {spec: [] for spec in specs}
    for rank in range(target.world):
        for spec, box in boxes_of(specs, rank, target, homes, shapes):
            held[spec].append(box)
    for spec, boxes in held.items():
        assert uncovered(spec, boxes) is None, spec
        if spec.shape:
            assert overlapping(boxes) is None, spec


def test_blocks_are_found_by_their_bytes() -> None:
    """They are the numbered modules with most bytes.

    Other tensors are placed by patterns or by the mesh that wrote them.
    """
    specs = list(scenes.state(1))
    homes = find_homes(specs)
    assert (homes.blocks, homes.count) == ("blocks", 4)
    assert homes.guessed == {"embed.weight", "norm.weight", "head.weight"}
    stages = [{"model/embed.weight", "model/blocks.0.mlp.weight"}, {"model/norm.weight", "model/head.weight"}]
    placed = find_homes(specs, stages=stages)
    assert (placed.last, placed.guessed) == ({"norm.weight", "head.weight"}, frozenset())
    with pytest.raises(LayoutError, match="found: blocks"):
        find_homes(specs, blocks="layers")


def test_a_checkpoint_written_in_stages_shows_what_comes_last(history: History) -> None:
    """Two stages wrote the first checkpoint, so nothing has to be guessed."""
    homes = homes_of(saved(history, 0), None, [])
    assert (homes.last, homes.guessed) == ({"norm.weight", "head.weight"}, frozenset())


@pytest.mark.parametrize("text", ["pp=2,dp=3,tp=2", "dp=3", "pp=4", "dp=1"])
def test_planned_reads_are_those_a_restore_makes(history: History, text: str) -> None:
    """Each rank gets its bytes, and the store is asked for the planned tiles and no others."""
    target = MeshSizes.parse(text)
    first = saved(history, 1)
    homes = homes_of(first, None, [])
    shapes = {parameter_of(key): spec.shape for key, spec in first.specs.items() if key.startswith("model/")}
    plans = list(plan_reads(first, target, homes))
    assert len(plans) == target.world
    for rank, plan in enumerate(plans):
        counting = scenes.Counting(history.store)
        opened = dataclasses.replace(open_checkpoint(history.store, first.name), store=counting)
        wanted = list(boxes_of(first.specs.values(), rank, target, homes, shapes))
        buffers = {(spec, box): bytearray(box.numel * spec.itemsize) for spec, box in wanted}
        resolved = resolve(
            wanted,
            opened.offers(),
            {"store": opened.source()},
            lambda spec, box, own=buffers: memoryview(own[spec, box]),
        )
        assert plan.needed == sum(map(len, buffers.values()))
        assert plan.tiles == resolved.sources["store"].tiles
        assert plan.packs == len(set(counting.packs))
        assert plan.requests == len(counting.packs)
        assert plan.read >= plan.stored


def test_a_region_that_nobody_saved_cannot_be_planned(history: History) -> None:
    """A restore would refuse it as well."""
    spec = TensorSpec(key="model/none", dtype="float32", shape=(2,))
    with pytest.raises(Exception, match="no such region"):
        TileIndex(saved(history, 0).tiles).reads([(spec, spec.box)])


@pytest.mark.parametrize("text", ["", "pp", "pp=0", "pp=1,pp=2", "xp=2", "dp=-1", "dp=2,", "dp=1048577", "dp=9999999"])
def test_a_malformed_mesh_is_refused(text: str) -> None:
    """The message shows an example."""
    with pytest.raises(LayoutError, match="mesh"):
        MeshSizes.parse(text)
