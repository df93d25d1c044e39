"""`vetted` follows what checkpoints and audits say, by any leader."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest

from checkpointing import Distrust, Store, commit, mark_distrusted, open_store, read_latest
from elastic3d.worker.checkpoints.committer import Committer, CommitterEvent, FencedStore
from elastic3d.worker.checkpoints.housekeeping import Housekeeper, HousekeeperEvent, Vetted
from elastic3d.worker.checkpoints.node_checkpoints import Checkpoints
from elastic3d.worker.checkpoints.vetting import NOT_AUDITED, NOT_YET, LiveAudits, vet
from elastic3d.worker.journal import Journal
from elastic3d.worker.options import Saving, Verification
from elastic3d.worker.pulse import Figures
from tests.worker.checkpoints.test_committer import write
from tests.worker.checkpoints.test_uploader import generation
from tests.worker.keeper.test_standing import record


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def committed(store: Store, step: int, made_in: int = 1, **clean: int) -> str:
    """Commit a checkpoint whose facts say how far its nodes were vouched for; without nodes, nothing."""
    write(store, step, made_in=made_in, facts={"clean_nodes": clean} if clean else {})
    return commit(store, step=step, made_in=made_in, attempt=0, committed_in=made_in, world=1).checkpoint


def said(store: Store, live: LiveAudits | None = None) -> tuple[int | None, str]:
    vetting = vet(store, live)
    assert vetting.newest == (vetting.step is not None and vetting.step == read_latest(store).step)  # type: ignore[union-attr]
    return vetting.step, vetting.why


def pointed(store: Store) -> int | None:
    ref = read_latest(store)
    assert ref is not None
    return None if ref.vetted is None else int(ref.vetted.checkpoint.partition(".")[0])


def test_a_checkpoint_is_vetted_by_what_a_later_one_says(store: Store) -> None:
    """Of all its nodes: without the word about one of them it is not, however much is known of the others."""
    assert said(store) == (None, "")
    committed(store, 5)
    assert said(store) == (None, NOT_AUDITED)
    committed(store, 10, a=8, b=8)
    assert said(store) == (None, NOT_YET)
    committed(store, 20, a=18, b=18)
    assert said(store) == (10, "")
    committed(store, 30, a=28, c=28)  # b has left
    assert said(store) == (10, "")
    committed(store, 40, a=35, c=35)
    assert said(store) == (30, "")
    assert pointed(store) == 30


def test_an_audit_vets_at_once_and_only_what_it_saw(store: Store) -> None:
    """An older generation's audit of a step says nothing about the one in which that step was made again."""
    committed(store, 10, a=8, b=8)
    assert said(store, LiveAudits(generation=1, clean={"a": 9, "b": 9})) == (None, NOT_YET)
    assert said(store, LiveAudits(generation=1, clean={"a": 10, "b": 10})) == (10, "")
    committed(store, 12, made_in=2, a=9, b=9)
    assert said(store, LiveAudits(generation=1, clean={"a": 14, "b": 14})) == (10, "")
    assert said(store, LiveAudits(generation=2, clean={"a": 12, "b": 12})) == (12, "")


def test_what_a_rule_refuses_is_never_vetted(store: Store) -> None:
    """Neither before the rule came, nor after."""
    committed(store, 10, a=8)
    committed(store, 20, a=18)
    assert said(store) == (10, "")
    mark_distrusted(store, [Distrust(before=2, step=12)])
    assert said(store, LiveAudits(generation=1, clean={"a": 25})) == (10, "")
    mark_distrusted(store, [Distrust(before=2, step=5)])
    assert pointed(store) is None
    assert said(store, LiveAudits(generation=1, clean={"a": 25})) == (None, NOT_YET)


def test_the_newest_vetted_one_outlives_retention(store: Store) -> None:
    """Where many checkpoints come between two audits, it is not among the newest for long."""
    answers: queue.SimpleQueue[HousekeeperEvent] = queue.SimpleQueue()
    saving = Saving(keep=1, grace=0.0, verification=Verification.OFF)
    keeper = Housekeeper(store, saving, answers.put, audits=True)
    name = committed(store, 1, a=0)
    keeper.committed(name, 1, 1.0)
    assert answers.get(timeout=20) == Vetted(step=None, why=NOT_YET)
    keeper.audited(LiveAudits(generation=1, clean={"a": 1}))
    while answers.get(timeout=20) != Vetted(step=1):
        pass
    for step in (2, 3):
        keeper.committed(committed(store, step, a=1), step, 1.0)
    keeper.close(20.0)
    ref = read_latest(store)
    assert ref is not None
    assert name in ref.committed
    assert pointed(store) == 1


def test_rules_reach_the_store_with_the_fence(store: Store) -> None:
    """So does the step that is committed at that very moment: it is marked whichever comes first."""
    answers: queue.SimpleQueue[CommitterEvent] = queue.SimpleQueue()
    committer = Committer(store, answers.put)
    committer.commit(write(store, 7), 1)
    committer.fence(1, (Distrust(before=2, step=3),))
    committer.commit(write(store, 8), 1)
    committer.close(20.0)
    heard = [answers.get(timeout=20) for _ in range(answers.qsize())]
    assert any(isinstance(one, FencedStore) for one in heard)
    ref = read_latest(store)
    assert ref is not None
    assert ref.checkpoint is not None
    assert ref.step == 8
    assert ref.distrusts(ref.checkpoint)


def test_the_leader_hears_of_audits_by_steps_and_of_none_before_its_generation(store: Store) -> None:
    """What a generation begins with was found about other nodes, as far as anybody knows."""
    name = committed(store, 10, node0=8)
    figures, journal = Figures(), Journal(None, "run", "node")
    node = Checkpoints(store, Saving(), [], lambda event: None, journal=journal, figures=figures, audits=True)
    node.fence(1)
    here = generation(1)
    for step, clean in ((21, 20), (22, 20)):
        node.audited(record(1, step, clean), here)
    node.close_committer(20.0)
    assert pointed(store) is None
    node = Checkpoints(store, Saving(), [], lambda event: None, journal=journal, figures=figures, audits=True)
    node.fence(1)
    for step, clean in ((21, 20), (22, 21)):
        node.audited(record(1, step, clean), here)
    node.close_committer(20.0)
    assert pointed(store) == 10
    ref = read_latest(store)
    assert ref is not None
    assert ref.checkpoint == name
    journal.close()
