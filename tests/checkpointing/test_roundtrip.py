"""Saving under one layout and restoring under another."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpointing import Piece, commit, fence, open_checkpoint, open_store, read_latest, save_rank
from checkpointing.errors import Incomplete, Inconsistent, NoCheckpoint
from checkpointing.format.tiles import Box, TensorSpec
from checkpointing.stores.protocol import Store
from tests.checkpointing.states import FACTS, SMALL, load, make_state, piece, save, save_and_commit, split, spread

_numbers = itertools.count()


def fresh() -> Store:
    return open_store(f"memory://roundtrip-{next(_numbers)}")


shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
dtypes = st.sampled_from(["float32", "bfloat16", "int64", "bool", "complex128"])
models = st.dictionaries(st.sampled_from(["a", "b/c", "ü"]), st.tuples(dtypes, shapes), min_size=1)
cuts = st.lists(st.integers(0, 7), max_size=4)
layouts = st.tuples(cuts, st.integers(0, 2))


@settings(max_examples=60, deadline=None)
@given(model=models, world=st.integers(1, 4), before=layouts, after=layouts)
def test_any_layout_restores_under_any_other(
    model: dict[str, tuple[str, tuple[int, ...]]],
    world: int,
    before: tuple[list[int], int],
    after: tuple[list[int], int],
) -> None:
    """Tensors cut one way for one number of ranks are restored with the same bytes cut another way."""
    store, state = fresh(), make_state(model)
    save(store, state, world=world, cuts=before[0], dim=before[1])
    commit(store, step=1, made_in=1, attempt=0, committed_in=1, world=world)
    boxes = {s: split(s, after[0], after[1] if after[1] < len(s.shape) else 0) for s in state}
    restored, _ = load(open_checkpoint(store), boxes)
    assert restored == state


def test_tiles_smaller_than_shards_are_restored() -> None:
    """A tensor of many tiles, on a grid that fits neither layout, is restored whole."""
    store, state = fresh(), make_state({"w": ("float32", (23, 5)), "deep": ("float32", (3, 4, 9))})
    save(store, state, world=3, cuts=(4, 11, 19), tile_bytes=48)
    done = commit(store, step=1, made_in=1, attempt=0, committed_in=1, world=3)
    assert done.totals.tiles > 20
    restored, _ = load(open_checkpoint(store), {s: split(s, (1, 2, 7)) for s in state})
    assert restored == state


def test_facts_and_identity_are_restored(tmp_path: Path) -> None:
    """Facts, step, generations and specs are those that were saved."""
    store, state = open_store(str(tmp_path)), make_state(SMALL)
    fence(store, 3)
    save(store, state, step=7, made_in=2)
    done = commit(store, step=7, made_in=2, attempt=0, committed_in=3, world=2)
    checkpoint = open_checkpoint(store)
    assert checkpoint.facts == FACTS
    assert (checkpoint.step, checkpoint.made_in, checkpoint.committed_in) == (7, 2, 3)
    assert checkpoint.specs == {spec.key: spec for spec in state}
    assert (checkpoint.name, checkpoint.root) == (done.checkpoint, done.root)
    assert load(open_checkpoint(store, done.checkpoint))[0] == load(open_checkpoint(store, done.ref))[0] == state


def test_the_root_names_contents_not_layout() -> None:
    """If no shard boundary cuts a tile, another layout and another store give the same root."""
    state = make_state({"a": ("float32", (4, 4)), "b": ("float32", (8,)), "step": ("float32", ())})
    roots = set()
    for world in (1, 2, 3):
        store = fresh()
        save(store, state, world=world, cuts=())
        roots.add(commit(store, step=1, made_in=1, attempt=0, committed_in=1, world=world).root)
    assert len(roots) == 1


def test_same_inputs_give_the_same_bytes() -> None:
    """Two saves of the same state write the same packs and manifests, byte for byte."""
    stores = [fresh(), fresh()]
    for store in stores:
        save(store, make_state(SMALL))
    names = [list(store.list("")) for store in stores]
    assert names[0] == names[1]
    assert len([name for name in names[0] if name.startswith("packs/")]) == 2
    assert all(stores[0].get(name) == stores[1].get(name) for name in names[0])


def test_an_unchanged_tile_is_referenced_not_written() -> None:
    """With a parent only changed tiles go into the new pack, and the checkpoint restores whole."""
    store, state = fresh(), make_state(SMALL)
    save_and_commit(store, state)
    parent = open_checkpoint(store)
    changed = {**state, **make_state({"model/b": SMALL["model/b"]}, seed=5)}
    written = [
        save_rank(
            store, step=2, made_in=1, attempt=0, rank=rank, world=2, pieces=pieces, facts=FACTS, parent=parent
        ).written
        for rank, pieces in enumerate(spread(changed, 2, (2, 4)))
    ]
    assert sum(written) == 7 * 2
    commit(store, step=2, made_in=1, attempt=0, committed_in=1, world=2)
    assert load(open_checkpoint(store))[0] == changed


def test_a_retried_save_changes_nothing() -> None:
    """Saving and committing again leaves every object as it was."""
    store, state = fresh(), make_state(SMALL)
    first = save_and_commit(store, state)
    before = {name: store.get(name) for name in store.list("")}
    again = save_and_commit(store, state)
    assert (again.checkpoint, again.moved) == (first.checkpoint, False)
    assert {name: store.get(name) for name in store.list("")} == before


def test_a_damaged_pack_of_an_earlier_try_is_written_again() -> None:
    """A retry checks an existing pack before it relies on it."""
    store, state = fresh(), make_state(SMALL)
    save(store, state)
    for name in list(store.list("packs/")):
        data = bytearray(store.get(name))
        data[10] ^= 1
        store.put(name, bytes(data))
    for name in list(store.list("saves/")):
        store.delete(name)
    save_and_commit(store, state)
    assert load(open_checkpoint(store))[0] == state


def test_another_state_under_the_same_save_is_refused() -> None:
    """A step, generation and attempt identify one state."""
    store = fresh()
    save(store, make_state(SMALL))
    with pytest.raises(Inconsistent, match="new attempt"):
        save(store, make_state(SMALL, seed=1))


def test_an_incomplete_save_is_refused_with_what_is_missing() -> None:
    """A commit needs all ranks and all of every tensor."""
    store, state = fresh(), make_state(SMALL)
    save(store, state)
    save_rank(store, step=1, made_in=1, attempt=0, rank=2, world=3, pieces=[], facts=FACTS)
    with pytest.raises(Inconsistent, match="world of 2, not 3"):
        commit(store, step=1, made_in=1, attempt=0, committed_in=1, world=3)
    with pytest.raises(Incomplete, match="no manifest from ranks 0, 1 of 2"):
        commit(store, step=9, made_in=1, attempt=0, committed_in=1, world=2)
    spec = TensorSpec(key="w", dtype="float32", shape=(4, 4))
    half = piece(spec, bytes(64), Box(start=(0, 0), stop=(4, 3)))
    save_rank(store, step=2, made_in=1, attempt=0, rank=0, world=1, pieces=[half], facts=FACTS)
    with pytest.raises(Incomplete, match=r"w \[0:4, 3:4\]"):
        commit(store, step=2, made_in=1, attempt=0, committed_in=1, world=1)
    assert read_latest(store) is None
    with pytest.raises(NoCheckpoint, match="nothing was ever committed"):
        open_checkpoint(store)


def test_ranks_that_disagree_are_refused() -> None:
    """Replicas with different bits, facts or shapes are named, not mixed."""
    store = fresh()
    spec = TensorSpec(key="w", dtype="uint8", shape=(4,))
    other = TensorSpec(key="w", dtype="uint8", shape=(5,))
    cases = [
        ((spec, b"abcd", {}), (spec, b"abcX", {}), "different contents of w"),
        ((spec, b"abcd", {}), (spec, b"abcd", {"lr": 1}), "facts of rank 1"),
        ((spec, b"abcd", {}), (other, b"abcde", {}), r"w is uint8 \[5\] on rank 1"),
    ]
    for attempt, (*ranks, message) in enumerate(cases):
        for rank, (tensor, data, facts) in enumerate(ranks):
            pieces = [piece(tensor, data, tensor.box)]
            save_rank(store, step=1, made_in=1, attempt=attempt, rank=rank, world=2, pieces=pieces, facts=facts)
        with pytest.raises(Inconsistent, match=message):
            commit(store, step=1, made_in=1, attempt=attempt, committed_in=1, world=2)


@pytest.mark.parametrize("facts", [{"x": float("nan")}, {"x": {1: 2}}, {"x": object()}])
def test_facts_that_json_would_change_are_refused(facts: dict[str, object]) -> None:
    """At the save, if they would not read back unchanged."""
    with pytest.raises(ValueError, match="facts"):
        save(fresh(), make_state(SMALL), facts=facts)


def test_invalid_pieces_are_refused() -> None:
    """Boxes outside the tensor, wrong lengths, overlaps and unknown dtypes are the caller's mistakes."""
    spec = TensorSpec(key="w", dtype="uint8", shape=(4,))
    whole = piece(spec, b"abcd", spec.box)
    wrong = TensorSpec(key="w", dtype="float5", shape=(4,))
    outside = Box(start=(2,), stop=(6,))
    for pieces, message in [
        ([whole, whole], "overlap"),
        ([Piece(spec=spec, box=outside, data=memoryview(b"abcd"))], "not in a tensor"),
        ([Piece(spec=spec, box=spec.box, data=memoryview(b"abc"))], "takes 4"),
        ([Piece(spec=wrong, box=wrong.box, data=memoryview(b"abcd"))], "float5"),
    ]:
        with pytest.raises(ValueError, match=message):
            save_rank(fresh(), step=1, made_in=1, attempt=0, rank=0, world=1, pieces=pieces, facts={})
