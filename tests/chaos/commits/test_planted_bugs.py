"""Random schedules find each classical mistake that is planted into a small seam of the protocol."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, cast

import pytest

from chaos.commits import actors, numbered
from chaos.commits.model import ModelStore, Seat
from chaos.commits.numbered import NumberedStore
from chaos.commits.registered import RegisteredModel
from chaos.commits.run import Outcome, play, smallest
from chaos.commits.schedule import draw, parse
from checkpointing import SavedRank
from checkpointing.errors import StoreError, StoreNotFound
from checkpointing.format import names
from checkpointing.format.announcement import AtWork
from checkpointing.format.refs import Ref, Verdict, decide_commit, decode_ref, encode_ref
from checkpointing.retention import collection, plan
from checkpointing.retention.plan import Marker
from checkpointing.saving import commit as committing
from checkpointing.saving import save as saving
from checkpointing.stores import register
from checkpointing.stores.numbered import newest
from checkpointing.stores.protocol import Store
from checkpointing.stores.register import RegisteredStore

pytestmark = pytest.mark.long

MOST = 600
"""Schedules within which a planted bug has to show."""

Plant = Callable[[pytest.MonkeyPatch], None]


def keep_the_fence_outside_the_store(patch: pytest.MonkeyPatch) -> None:
    """Leaders check before they begin whether they are fenced off, but not when they swap."""

    def decide(ref: Ref | None, *arguments: Any) -> Verdict:
        return decide_commit(ref and dataclasses.replace(ref, generation=0), *arguments)

    patch.setattr(committing, "decide_commit", decide)


def repeat_conditional_writes_blindly(patch: pytest.MonkeyPatch) -> None:
    """A failed swap is sent again, and if that is refused it is reported as lost to somebody else."""

    def move(store: Store, decide: Callable[..., Verdict], build: Callable[..., Ref], **_: bool) -> object:
        for _ in range(8):
            stored = store.read(names.LATEST)
            ref = None if stored is None else decode_ref(stored.data, names.LATEST)
            verdict = decide(ref)
            if verdict is not Verdict.MOVE:
                return verdict, ref
            moved = build(ref, "no write-id")
            data = encode_ref(moved)
            token = stored.token if stored else None
            try:
                if store.compare_and_swap(names.LATEST, token, data):
                    return Verdict.MOVE, moved
            except StoreError:
                done = store.compare_and_swap(names.LATEST, token, data)
                return (Verdict.MOVE, moved) if done else (Verdict.SUPERSEDED, ref or moved)
        raise AssertionError

    patch.setattr(committing, "move", move)


class Overwriting:
    """A store whose writer ignores existing manifests and puts its own."""

    def __init__(self, store: Seat) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if name.startswith("saves/"):
            raise StoreNotFound("it is not looked for")
        return self._store.get(name, start, stop)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        self._store.put(name, data)
        return True


def overwrite_manifests(patch: pytest.MonkeyPatch) -> None:
    """Manifests are put, not created: a restarted rank overwrites its own."""

    honest = actors.save_rank

    def careless(store: Seat, **arguments: Any) -> SavedRank:
        return honest(cast(Store, Overwriting(store)), **arguments)

    patch.setattr(actors, "save_rank", careless)


def ignore_the_order_of_saves(patch: pytest.MonkeyPatch) -> None:
    """A leader with the newest generation may commit anything, older steps too."""
    patch.setattr(committing, "is_superseded", lambda ref, save: False)

    def decide(*arguments: Any) -> Verdict:
        verdict = decide_commit(*arguments)
        return Verdict.MOVE if verdict is Verdict.SUPERSEDED else verdict

    patch.setattr(committing, "decide_commit", decide)


@dataclasses.dataclass(slots=True)
class Careless(ModelStore):
    """A store that accepts every swap, whatever the token."""

    def swap(self, name: str, expected: str | None, data: bytes) -> bool:
        self.put(name, data)
        return True


def commit_what_is_not_complete(patch: pytest.MonkeyPatch) -> None:
    """Nobody checks whether all ranks have saved."""
    patch.setattr(committing, "check_complete", lambda manifests, save, world: None)


def commit_without_looking_for_packs(patch: pytest.MonkeyPatch) -> None:
    """Nobody checks whether the packs of a manifest exist, nor whether they are condemned."""
    patch.setattr(committing, "_check_packs", lambda store, manifests: None)
    patch.setattr(committing, "_check_condemned", lambda *arguments: None)


def collect_without_looking_again(patch: pytest.MonkeyPatch) -> None:
    """Marked objects are deleted although a commit before the sweep may need them by now."""
    patch.setattr(collection, "_same", lambda ref, marked: True)
    patch.setattr(Marker, "deletable", lambda self, tombstone, ref: tombstone.objects)


def collect_without_hearing_announcements(patch: pytest.MonkeyPatch) -> None:
    """Announcements of long reads and writes are ignored."""
    patch.setattr(plan, "announced_in", lambda store, now: AtWork())


def first_failure(store: Callable[[], ModelStore] = ModelStore, seeds: range = range(1, MOST + 1)) -> Outcome | None:
    """Return the first schedule that shows a violation."""
    return next((o for o in (play(draw(seed), store=store()) for seed in seeds) if o.violations), None)


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (keep_the_fence_outside_the_store, "had fenced it off|took the generation of latest back"),
        (repeat_conditional_writes_blindly, "was refused (Superseded), and yet|had fenced it off"),
        (overwrite_manifests, "which is written once|cannot be restored"),
        (ignore_the_order_of_saves, "took latest back|cannot be restored"),
        (commit_without_looking_for_packs, "cannot be restored"),
        (collect_without_looking_again, "cannot be restored|lost the committed"),
        (collect_without_hearing_announcements, "had announced that it reads"),
        (commit_what_is_not_complete, "cannot be restored|completeness was checked"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_bug_is_found(plant: Plant, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a few hundred schedules, by the invariant it breaks; the unmodified code passes the same schedule."""
    plant(monkeypatch)
    # Three actors have to coincide: four schedules in 2,400 show it.
    first = 1701 if plant is collect_without_looking_again else 1
    outcome = first_failure(seeds=range(first, first + MOST))
    assert outcome is not None, f"{MOST} schedules did not show it"
    assert any(word in "\n".join(outcome.violations) for word in words.split("|")), outcome.report()
    monkeypatch.undo()
    assert play(outcome.schedule).violations == []


def test_a_store_that_ignores_tokens_is_found() -> None:
    """A compare-and-swap that does not compare loses a commit or a fence."""
    outcome = first_failure(Careless)
    assert outcome is not None
    assert any("back from" in violation or "lost" in violation for violation in outcome.violations), outcome.report()
    assert play(outcome.schedule).violations == []


def lock_that_does_not_hold(patch: pytest.MonkeyPatch) -> None:
    """Swaps as shared directories once had them: compare under a lock, then rename; the lock does not hold."""

    def swap(versions: Any, expected: str, data: bytes, where: str) -> bool:
        current = newest(versions, where)
        if current is None or current[1].token != expected:
            return False
        number = current[0]
        while not versions.link(number := number + 1, data):
            pass
        return True

    patch.setattr(numbered, "swap", swap)


def test_a_directory_with_a_broken_lock_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two swaps both succeed; numbered links pass the same schedule."""
    lock_that_does_not_hold(monkeypatch)
    outcome = first_failure(NumberedStore)
    assert outcome is not None, f"{MOST} schedules did not show it"
    monkeypatch.undo()
    assert play(outcome.schedule, store=NumberedStore()).violations == []


def test_a_directory_without_a_bug_passes() -> None:
    """Whatever happens between the steps of a swap."""
    outcome = first_failure(NumberedStore, range(1, 41))
    assert outcome is None, outcome.report()


def name_manifests_by_rank_alone(patch: pytest.MonkeyPatch) -> None:
    """The register does not decide manifests, and yet a restarted rank writes to the same name."""
    overwrite_manifests(patch)
    patch.setattr(saving, "decides_creations", lambda store: True)
    patch.setattr(committing, "decides_creations", lambda store: True)


def forget_what_was_decided(patch: pytest.MonkeyPatch) -> None:
    """A decided record, its own or another's, is taken to be where readers look for it."""

    def claimed(store: RegisteredStore, name: str, digest: str) -> bytes:
        for place in (name, register._aside(name, digest)):
            with contextlib.suppress(StoreNotFound):
                return store._store.get(place)
        raise StoreError("nowhere")

    patch.setattr(RegisteredStore, "_claimed", claimed)


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (name_manifests_by_rank_alone, "which is written once"),
        (forget_what_was_decided, "there is no checkpoint"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_bug_is_found_with_a_register(plant: Plant, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store then decides nothing itself."""
    plant(monkeypatch)
    outcome = first_failure(RegisteredModel)
    assert outcome is not None, f"{MOST} schedules did not show it"
    assert words in "\n".join(outcome.violations), outcome.report()
    monkeypatch.undo()
    assert play(outcome.schedule, store=RegisteredModel()).violations == []


def test_a_register_passes_and_holds_only_refs_and_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where ranks never find what they have written, and write another manifest."""
    overwrite_manifests(monkeypatch)
    most = 0
    for seed in range(1, 41):
        store = RegisteredModel()
        asked: set[str] = set()
        store.observers.append(lambda change, asked=asked: asked.add(change.name))  # type: ignore[misc]
        outcome = play(draw(seed), store=store)
        assert outcome.violations == [], outcome.report()
        assert all(name.startswith((names.REFS, names.CHECKPOINTS)) for name in store.values)
        ranks = [names.parse_manifest(name) for name in asked if names.parse_manifest(name)]
        most = max(most, max(map(ranks.count, ranks), default=0))
    assert most > 1, "no rank wrote two"


def test_a_failing_schedule_is_minimised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report has the seed, a few lines that still fail, and the operations that led to the failure."""
    keep_the_fence_outside_the_store(monkeypatch)
    outcome = first_failure()
    assert outcome is not None
    small = smallest(outcome)
    assert small.violations
    assert len(small.schedule.lines) < min(8, len(outcome.schedule.lines))
    report = small.report()
    assert report.startswith(f"# seed {outcome.schedule.job.seed}\nrun seed=")
    assert "VIOLATED" in report
    assert play(parse(report)).violations == small.violations
