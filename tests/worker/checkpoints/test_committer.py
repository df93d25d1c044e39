"""What the leader does in the store, and how it treats a store that does not answer."""

from __future__ import annotations

import queue
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from checkpointing import Store, fence, mark_verified, open_store, read_latest, save_rank
from checkpointing.errors import StoreError
from checkpointing.format import names
from checkpointing.format.tiles import Box, Piece, TensorSpec
from checkpointing.interchange.transfer import import_checkpoint
from elastic3d.membership.records import SavedStep
from elastic3d.worker.checkpoints import committer as c
from elastic3d.worker.checkpoints.committer import (
    CommitDone,
    CommitFailed,
    CommitNeedless,
    Committer,
    FencedStore,
    RefRepaired,
)

Told = queue.SimpleQueue[c.CommitterEvent]


def write(
    store: Store,
    step: int,
    rank: int = 0,
    world: int = 1,
    made_in: int = 1,
    attempt: int = 0,
    facts: dict[str, Any] | None = None,
) -> SavedStep:
    """Write one rank's part of a save of two rows."""
    spec = TensorSpec(key="model/w", dtype="float32", shape=(world, 4))
    box = Box(start=(rank, 0), stop=(rank + 1, 4))
    data = memoryview(torch.full((4,), float(step)).numpy().tobytes())
    save_rank(
        store,
        step=step,
        made_in=made_in,
        attempt=attempt,
        rank=rank,
        world=world,
        pieces=[Piece(spec=spec, box=box, data=data)],
        facts=facts or {},
    )
    return SavedStep(step=step, made_in=made_in, attempt=attempt, world=world)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def inbox() -> Told:
    return queue.SimpleQueue()


@pytest.fixture
def committer(store: Store, inbox: Told) -> Iterator[Committer]:
    committer = Committer(store, inbox.put, patience=0.5)
    yield committer
    committer.close(10.0)


def step_of(inbox: Told) -> int:
    done = inbox.get(timeout=10)
    assert isinstance(done, CommitDone), done
    return done.saved.step


def test_the_committer_waits_for_ranks_that_are_still_writing(store: Store, inbox: Told) -> None:
    """A commit requested too early is made once the save is whole, without another request."""
    committer = Committer(store, inbox.put)
    try:
        committer.commit(write(store, 5, rank=0, world=2), 1)
        write(store, 5, rank=1, world=2)
        assert step_of(inbox) == 5
    finally:
        committer.close(10.0)


def test_the_committer_gives_up_ranks_that_never_write(committer: Committer, store: Store, inbox: Told) -> None:
    """They died; it is reported once, and nothing is changed."""
    committer.commit(write(store, 5, rank=0, world=2), 1)
    failed = inbox.get(timeout=10)
    assert isinstance(failed, CommitFailed)
    assert not failed.again
    assert read_latest(store) is None


def test_a_newer_leader_ends_the_commits_of_an_older_one(committer: Committer, store: Store, inbox: Told) -> None:
    """Whatever the older one believes."""
    fence(store, 7)
    committer.commit(write(store, 5), 6)
    failed = inbox.get(timeout=10)
    assert isinstance(failed, CommitFailed)
    assert not failed.again
    ref = read_latest(store)
    assert ref is not None
    assert (ref.generation, ref.checkpoint) == (7, None)


def test_a_checkpoint_imported_above_the_own_ones_is_said_and_not_taken_for_one(
    committer: Committer, store: Store, inbox: Told, tmp_path: Path
) -> None:
    """Nothing of the job is saved until it is past that step: without a word nobody would know."""
    committer.fence(1)
    assert isinstance(inbox.get(timeout=10), FencedStore)
    torch.save({"w": torch.ones(3)}, tmp_path / "other.pt")
    import_checkpoint("torch", tmp_path / "other.pt", store, step=1000)
    committer.commit(write(store, 5, attempt=3), 1)
    failed = inbox.get(timeout=10)
    assert isinstance(failed, CommitFailed)
    assert not failed.again
    assert re.search(r"latest is at step 1000.*it was imported into the job's store", failed.error)
    committer.commit(write(store, 1001, attempt=3), 1)
    assert step_of(inbox) == 1001


def test_a_save_that_another_leader_of_its_generation_has_passed_is_needless(store: Store, inbox: Told) -> None:
    """Its own later saves are no trouble."""
    older, newer = (write(store, step, attempt=3) for step in (5, 6))
    for saved, kind in ((newer, CommitDone), (older, CommitNeedless)):
        leader = Committer(store, inbox.put)
        leader.commit(saved, 1)
        leader.close(10.0)
        assert isinstance(inbox.get(timeout=10), kind)


@pytest.mark.parametrize("again", [3, 4])
def test_a_missing_store_is_retried_until_it_is_back(again: int, tmp_path: Path, store: Store, inbox: Told) -> None:
    """The trouble is reported once; fences and commits are made when the store answers again.

    Also what the same leader was asked for before it formed another generation.
    """
    saved = write(store, 5)
    (tmp_path / "store").rename(tmp_path / "away")
    (tmp_path / "store").write_text("no directory")
    committer = Committer(store, inbox.put)
    try:
        committer.fence(3)
        committer.commit(saved, 3)
        failures = [inbox.get(timeout=10) for _ in range(2)]
        assert all(isinstance(failed, CommitFailed) and failed.again for failed in failures)
        if again == 4:
            committer.fence(again)
            assert isinstance(inbox.get(timeout=10), CommitFailed)
        (tmp_path / "store").unlink()
        (tmp_path / "away").rename(tmp_path / "store")
        said = [inbox.get(timeout=10) for _ in range(2)]
        assert {type(one) for one in said} == {FencedStore, CommitDone}
    finally:
        committer.close(10.0)
    ref = read_latest(store)
    assert ref is not None
    assert (ref.generation, ref.step) == (again, 5)


def test_a_damaged_latest_is_written_anew(committer: Committer, store: Store, inbox: Told) -> None:
    """Else no save would be committed any more, and a job that waits for its last one would never end."""
    first, second = write(store, 4), write(store, 5)
    committer.commit(first, 1)
    assert step_of(inbox) == 4
    latest = store.read(names.LATEST)
    assert latest is not None
    assert store.compare_and_swap(names.LATEST, latest.token, latest.data[:-1] + b"?")
    committer.commit(second, 1)
    failed, repaired = inbox.get(timeout=10), inbox.get(timeout=10)
    assert isinstance(failed, CommitFailed)
    assert (failed.again, "refs/latest: its bytes do not match" in failed.error) == (True, True)
    assert isinstance(repaired, RefRepaired)
    assert step_of(inbox) == 5
    ref = read_latest(store)
    assert ref is not None
    assert (ref.step, len(ref.committed)) == (5, 2)


def test_the_newest_save_is_committed_first(store: Store, inbox: Told) -> None:
    """It supersedes older pending ones: after an outage nobody works through all of them."""
    committer = Committer(store, inbox.put)
    saves = [write(store, step) for step in (5, 6)]
    waiting = write(store, 4, rank=0, world=2)
    committer.commit(waiting, 1)
    for saved in saves:
        committer.commit(saved, 1)
    seen = {step_of(inbox)}
    while 6 not in seen:
        seen.add(step_of(inbox))
    committer.close(10.0)
    assert inbox.empty()


class Unsure:
    """A store whose ref cannot be read the first time."""

    def __init__(self, store: Store) -> None:
        self._store, self._fails = store, 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, name: str) -> Any:
        if name == "refs/latest" and self._fails:
            self._fails -= 1
            raise StoreError("its bytes do not match the digest it ends with")
        return self._store.read(name)


def test_a_save_that_waits_for_its_next_try_is_committed_after_an_older_one(store: Store, inbox: Told) -> None:
    """It may be the run's last: nobody asks for it again."""
    saves = [write(store, step) for step in (5, 6)]
    committer = Committer(cast(Store, Unsure(store)), inbox.put)
    try:
        committer.commit(saves[1], 1)
        failed = inbox.get(timeout=10)
        assert isinstance(failed, CommitFailed)
        assert (failed.saved, failed.again) == (saves[1], True)
        committer.commit(saves[0], 1)
        assert [step_of(inbox), step_of(inbox)] == [5, 6]
    finally:
        committer.close(10.0)
    ref = read_latest(store)
    assert ref is not None
    assert ref.step == 6


def test_whoever_fails_to_take_a_report_is_told_again(store: Store, inbox: Told) -> None:
    """A run ends once it knows that its last step is committed."""
    failing = [ValueError("the journal is full")]

    def report(event: c.CommitterEvent) -> None:
        if isinstance(event, CommitDone) and failing:
            raise failing.pop()
        inbox.put(event)

    committer = Committer(store, report)
    try:
        saved = write(store, 5)
        committer.commit(saved, 1)
        failed = inbox.get(timeout=10)
        assert isinstance(failed, CommitFailed)
        assert (failed.error, failed.again) == ("ValueError: the journal is full", True)
        assert inbox.get(timeout=10) == CommitNeedless(saved=saved)
    finally:
        committer.close(10.0)


def test_requested_commits_are_made_before_close_returns(store: Store, inbox: Told) -> None:
    """`close` leaves time for it."""
    committer = Committer(store, inbox.put)
    committer.commit(write(store, 5), 1)
    committer.close(10.0)
    assert step_of(inbox) == 5


def test_a_new_leader_knows_the_age_of_the_newest_checkpoint(store: Store, inbox: Told) -> None:
    """By the store's clock: the node that committed it may be gone."""
    first = Committer(store, inbox.put)
    first.fence(1)
    first.commit(write(store, 5), 1)
    first.close(10.0)
    assert inbox.get(timeout=10) == FencedStore(step=-1, age=None, verified_step=-1, verified_age=None)
    assert step_of(inbox) == 5
    mark_verified(store, "latest")
    second = Committer(store, inbox.put)
    second.fence(2)
    second.close(10.0)
    answer = inbox.get(timeout=10)
    assert isinstance(answer, FencedStore)
    assert (answer.step, answer.verified_step) == (5, 5)
    assert answer.age is not None
    assert 0.0 <= answer.age < 3600.0
