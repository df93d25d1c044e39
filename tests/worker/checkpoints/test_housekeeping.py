"""What the leader does after a commit."""

from __future__ import annotations

import queue
import time
from pathlib import Path

import pytest

from checkpointing import Committed, Store, commit, open_store, read_ref
from checkpointing.errors import CheckpointError
from elastic3d.worker.checkpoints.housekeeping import (
    Bounded,
    Housekeeper,
    HousekeeperEvent,
    Swept,
    Verified,
    VerifyFailed,
    verify_committed,
)
from elastic3d.worker.options import Saving, Verification
from tests.worker.checkpoints.test_committer import write


def committed(store: Store, step: int) -> Committed:
    write(store, step)
    return commit(store, step=step, made_in=1, attempt=0, committed_in=1, world=1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def flip(folder: Path) -> None:
    """Change one bit of every pack's tiles."""
    for pack in folder.glob("**/*.pack"):
        data = bytearray(pack.read_bytes())
        data[10] ^= 1
        pack.write_bytes(data)


def test_verified_moves_after_a_checkpoint_was_read_back(store: Store) -> None:
    """And the leader learns how much of it was read."""
    answers: queue.SimpleQueue[HousekeeperEvent] = queue.SimpleQueue()
    keeper = Housekeeper(store, Saving(), answers.put)
    keeper.committed(committed(store, 5).checkpoint, 5, 1.0)
    said = answers.get(timeout=10)
    keeper.close(10.0)
    assert isinstance(said, Verified)
    assert (said.step, said.how) == (5, Verification.SAMPLE)
    ref = read_ref(store, "verified")
    assert ref is not None
    assert ref.step == 5


def test_verified_does_not_move_to_a_damaged_checkpoint(store: Store, tmp_path: Path) -> None:
    """A bit flipped on the way into the store is found before anybody relies on it."""
    answers: queue.SimpleQueue[HousekeeperEvent] = queue.SimpleQueue()
    keeper = Housekeeper(store, Saving(verification=Verification.ALL), answers.put)
    keeper.committed(committed(store, 5).checkpoint, 5, 1.0)
    assert isinstance(answers.get(timeout=10), Verified)
    name = committed(store, 6).checkpoint
    flip(tmp_path / "store")
    with pytest.raises(CheckpointError):
        verify_committed(store, name, Verification.ALL)
    keeper.committed(name, 6, 1.0)
    said = answers.get(timeout=10)
    keeper.close(10.0)
    assert isinstance(said, VerifyFailed)
    ref = read_ref(store, "verified")
    assert ref is not None
    assert ref.step == 5


def test_only_the_newest_of_fast_commits_is_verified(store: Store) -> None:
    """Those between are skipped, and the last is not forgotten at the end."""
    answers: queue.SimpleQueue[HousekeeperEvent] = queue.SimpleQueue()
    names = [(committed(store, step).checkpoint, step) for step in (5, 6, 7)]
    keeper = Housekeeper(store, Saving(), answers.put)
    for name, step in names:
        keeper.committed(name, step, 1.0)
    keeper.close(10.0)
    steps = []
    while not answers.empty():
        said = answers.get()
        assert isinstance(said, Verified)
        steps.append(said.step)
    assert steps[-1] == 7


def test_only_kept_checkpoints_stay(store: Store) -> None:
    """With keep=2 the older checkpoints are no longer committed."""
    answers: queue.SimpleQueue[HousekeeperEvent] = queue.SimpleQueue()
    for step in (4, 5, 6):
        committed(store, step)
    name = committed(store, 7).checkpoint
    keeper = Housekeeper(store, Saving(keep=2, grace=0.0), answers.put)
    keeper.committed(name, 7, 1.0)
    assert isinstance(answers.get(timeout=10), Verified)
    swept = answers.get(timeout=10)
    keeper.close(10.0)
    assert isinstance(swept, Swept)
    assert len(swept.collected.dropped) == 2


def test_condemned_checkpoints_are_deleted_in_time_without_another_commit(store: Store) -> None:
    """Nothing more is committed, and a collection would be due in five minutes."""
    answers: queue.SimpleQueue[HousekeeperEvent] = queue.SimpleQueue()
    for step in (4, 5, 6):
        committed(store, step)
    name = committed(store, 7).checkpoint
    time.sleep(0.1)  # older than the grace
    keeper = Housekeeper(store, Saving(keep=2, grace=0.1), answers.put)
    keeper.committed(name, 7, 1.0)
    assert isinstance(answers.get(timeout=30), Verified)
    freed = 0
    while not freed:
        swept = answers.get(timeout=60)
        assert isinstance(swept, Swept)
        freed += swept.collected.bytes
    keeper.close(10.0)


def test_a_size_limit_that_cannot_be_kept_is_reported(store: Store) -> None:
    """Only the newest checkpoint is left, and it takes more."""
    answers: queue.SimpleQueue[HousekeeperEvent] = queue.SimpleQueue()
    committed(store, 6)
    name = committed(store, 7).checkpoint
    keeper = Housekeeper(store, Saving(keep_bytes=1, grace=0.0), answers.put)
    keeper.committed(name, 7, 1.0)
    assert isinstance(answers.get(timeout=30), Verified)
    swept, bounded = answers.get(timeout=30), answers.get(timeout=30)
    keeper.close(10.0)
    assert isinstance(swept, Swept)
    assert len(swept.collected.dropped) == 1
    assert isinstance(bounded, Bounded)
    assert bounded.over > 0
