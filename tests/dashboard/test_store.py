"""The checkpoints of a job's store on its page: what is read, on which thread, and what a browser is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpointing import Store, TensorSpec, open_store
from checkpointing.errors import NoCheckpoint, StoreUnreachable
from checkpointing.format import names
from checkpointing.inspection.difference import Change, Difference, FactDifference, TensorDifference
from elastic3d.dashboard import store_listing
from elastic3d.dashboard.differences import difference
from elastic3d.dashboard.document import PageDocument
from elastic3d.dashboard.event_files import EventFolder
from elastic3d.dashboard.feed import ViewFeed
from elastic3d.dashboard.store_listing import StoredCheckpoint, StoreLister, StoreListing
from elastic3d.dashboard.store_reading import EVERY, StoreBusy, StoreReader, StoreSeen
from elastic3d.dashboard.store_view import comparison_page
from elastic3d.dashboard.view import view
from tests.cli.ckpt import scenes
from tests.cli.status.scenes import SCENES
from tests.clocks import HandClock
from tests.dashboard.serving import serving
from tests.dashboard.test_page import document_of, rendered
from tests.dashboard.test_reading import Source
from tests.dashboard.test_reading import reading as read_for_browsers
from tests.health.test_past_verdicts import bundle
from tests.pages.parsed import HOSTILE, assert_loads_nothing, assert_usable_without_a_mouse, parsed


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, list[str]]:
    """A store with four checkpoints, each but the first with the one before as its parent; nobody writes to it."""
    return scenes.run(tmp_path_factory.mktemp("run"))


class Hanging:
    """A lister of one checkpoint that hangs while `gate` is closed. compared: what it was asked for."""

    def __init__(self) -> None:
        self.gate, self.asked = threading.Event(), threading.Event()
        self.compared: list[tuple[str, str]] = []
        self.problem: Exception | None = None
        self.gate.set()

    def look(self) -> StoreListing:
        self._pass()
        return StoreListing(generation=1, checkpoints=(StoredCheckpoint(checkpoint="1.1.0.1", read=True),))

    def difference(self, before: str, after: str) -> Difference:
        self._pass()
        self.compared.append((before, after))
        return Difference(before=before, after=after, same=True, tensors=(), facts=())

    def _pass(self) -> None:
        self.asked.set()
        assert self.gate.wait(30)
        if self.problem is not None:
            raise self.problem


@contextmanager
def reading(lister: Any, **more: Any) -> Iterator[StoreReader]:
    """Have a store read on a thread, as the command does."""
    reader = StoreReader(lister, "file:///data/run", **more)
    thread = threading.Thread(target=reader.run)
    thread.start()
    try:
        yield reader
    finally:
        reader.stop()
        if isinstance(lister, Hanging):
            lister.gate.set()
        thread.join(20)
        assert not thread.is_alive()


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until something holds."""
    pause = threading.Event()
    for _ in range(2000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it never held")


def test_the_newest_checkpoints_are_listed_with_their_parents(run: tuple[Store, list[str]]) -> None:
    """Step, generations, bytes, what points to them, and from which one they took what did not change."""
    store, written = run
    counted = scenes.Counting(store)
    lister = StoreLister(lambda: counted)  # type: ignore[arg-type,return-value]
    listing = lister.look()
    assert listing.complete
    assert (listing.generation, listing.more) == (3, False)
    assert [one.checkpoint for one in listing.checkpoints] == written[::-1]
    assert [one.step for one in listing.checkpoints] == [400, 300, 200, 100]
    assert [one.parent for one in listing.checkpoints] == [*written[2::-1], None]
    newest = listing.checkpoints[0]
    assert (newest.made_in, newest.committed_in, newest.ranks, newest.bytes) == (2, 3, 3, scenes.BYTES)
    assert newest.labels == ("latest",)
    assert counted.packs == []
    counted.reads.clear()
    assert lister.look() == listing
    assert counted.reads == [names.LATEST]  # nothing that does not change is read again


def test_a_long_history_is_read_a_few_at_a_time(run: tuple[Store, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there can be shown while the rest is read; of the older ones the page says that there are some."""
    monkeypatch.setattr(store_listing, "AT_ONCE", 2)
    monkeypatch.setattr(store_listing, "SHOWN", 3)
    lister = StoreLister(lambda: run[0])
    first = lister.look()
    assert [one.read for one in first.checkpoints] == [True, True, False]
    assert (first.complete, first.more) == (False, True)
    assert lister.look().complete


def test_two_checkpoints_are_compared_by_any_of_their_names(run: tuple[Store, list[str]]) -> None:
    """Manifests only, and once: checkpoints do not change. One that is not there is an error that says so."""
    store, written = run
    counted = scenes.Counting(store)
    lister = StoreLister(lambda: counted)  # type: ignore[arg-type,return-value]
    changes = lister.difference("100", "latest")
    assert (changes.before, changes.after, changes.same) == (written[0], written[-1], False)
    assert counted.packs == []
    counted.reads.clear()
    assert lister.difference(written[0], "400") is changes
    assert not [name for name in counted.reads if not name.startswith("refs/")]
    assert lister.difference("latest", "latest").same
    with pytest.raises(NoCheckpoint, match="is no tag, step or committed checkpoint"):
        lister.difference("100", "nowhere")


def test_a_damaged_checkpoint_is_named_among_the_others(tmp_path: Path) -> None:
    """A record that is garbage; and an empty store is one without any."""
    assert StoreLister(lambda: open_store(str(tmp_path / "new"))).look() == StoreListing(generation=None)
    store, written = scenes.run(tmp_path / "run")
    store.put(names.record(written[1]), b"garbage")
    listing = StoreLister(lambda: store).look()
    assert [bool(one.error) for one in listing.checkpoints] == [False, False, True, False]
    assert listing.complete


def test_a_store_that_hangs_holds_nothing_up_and_is_said_to() -> None:
    """Its last listing stays, with its age; a comparison is given up in time; and both go on when it answers."""
    lister = Hanging()
    with reading(lister, patience=0.2) as reader:
        eventually(lambda: reader.seen().listing is not None)
        before = reader.seen()
        assert before.waiting_since is None
        lister.gate.clear()
        with pytest.raises(StoreBusy, match=r"has not answered within 0\.2 s"):
            reader.difference("1", "2")
        eventually(lambda: reader.seen().waiting_since is not None)
        seen = reader.seen()
        assert replace(seen, waiting_since=None) == before
        with pytest.raises(StoreBusy):
            reader.difference("1", "2")
        lister.gate.set()
        eventually(lambda: reader.seen().waiting_since is None)
        eventually(lambda: _compares(reader))
    assert lister.compared[-1] == ("3", "4")


def _compares(reader: StoreReader) -> bool:
    try:
        return reader.difference("3", "4").same
    except StoreBusy:
        return False


def test_whoever_comes_to_watch_sees_the_store_of_now() -> None:
    """Not that of the look before, which was made for nobody; where there was one just now, that is new enough."""
    clock, watchers = HandClock(wall=1000.0), [False]
    lister = Hanging()
    with reading(lister, watched=lambda: watchers[0], clock=clock) as reader:
        eventually(lambda: reader.seen().read_at == 1000.0)
        clock.now, clock.at = clock.now + EVERY + 1, 1011.0
        reader.hurry()
        assert reader.difference("1", "2").same
        assert reader.seen().read_at == 1000.0
        watchers[0] = True
        reader.hurry()
        eventually(lambda: reader.seen().read_at == 1011.0)


def test_a_store_that_is_away_is_said_to_be_and_looked_for_again() -> None:
    """With the reason on one line; the last listing stays; a comparison says the same."""
    lister = Hanging()
    with reading(lister) as reader:
        eventually(lambda: reader.seen().listing is not None)
        lister.problem = StoreUnreachable("s3://bucket:\n  nobody answers")
        with pytest.raises(StoreUnreachable):
            reader.difference("1", "2")
        assert reader.seen().problem == ""
    lister.gate.set()
    with reading(lister) as reader:
        eventually(lambda: reader.seen().problem != "")
        assert reader.seen() == StoreSeen(url="file:///data/run", problem="s3://bucket: nobody answers")


def with_store(seen: StoreSeen | None) -> PageDocument:
    return replace(document_of(SCENES["training"]()), store=seen)


def test_the_page_shows_lineage_and_offers_two_to_compare(run: tuple[Store, list[str]]) -> None:
    """The newest against the one before it, unless others are chosen; without a store it says how to name one."""
    listing = StoreLister(lambda: run[0]).look()
    document = with_store(StoreSeen(url="file:///data/run", listing=listing, read_at=1.0))
    text = rendered(document)
    assert_loads_nothing(text)
    read = parsed(text)
    assert_usable_without_a_mouse(read)
    assert "step 300 (made in 2, attempt 0, committed in 2)" in read.text
    assert "none: it stands for itself" in read.text
    chosen = [a["value"] for tag, a in read.seen if tag == "option" and "selected" in a and a["value"]]
    assert chosen == [run[1][-2], run[1][-1]]
    without = view(with_store(None))["parts"]
    assert "--store URL" in without["store"]
    assert "hidden" in dict(next(a for tag, a in parsed(rendered(with_store(None))).seen if tag == "form"))


def test_only_its_age_changes_while_the_store_does_not() -> None:
    """A browser is not sent the table again for it; what does not answer is said, with since when."""
    listing = StoreListing(generation=1, checkpoints=(StoredCheckpoint(checkpoint="1.1.0.1", read=True),))
    seen = StoreSeen(url="file:///x", listing=listing, read_at=100.0)
    before = view(with_store(seen))
    later = view(with_store(replace(seen, read_at=110.0)))
    assert list(difference(before, later)["parts"]) == ["store_state"]
    away = view(with_store(replace(seen, waiting_since=105.0, problem="nobody answers")))["parts"]
    assert 'The store does not answer; it was asked <time data-at="105.0">' in away["store_state"]
    assert "It cannot be read: nobody answers" in away["store_state"]
    assert away["store"] == before["parts"]["store"]


def test_what_stands_in_a_store_is_text() -> None:
    """Labels, parents, errors and names of tensors, on the page and on that of a comparison."""
    odd = StoredCheckpoint(checkpoint=HOSTILE, labels=(HOSTILE,), read=True, parent=HOSTILE)
    rows = (odd, replace(odd, error=HOSTILE), replace(odd, read=False))
    seen = StoreSeen(url=HOSTILE, listing=StoreListing(generation=1, checkpoints=rows), problem=HOSTILE)
    text = rendered(with_store(seen))
    read = parsed(text)
    assert read.tags.count("script") == 1
    assert "img" not in read.tags
    assert "\x1b" not in text
    spec = TensorSpec(key=HOSTILE, dtype="float32", shape=(2,))
    changes = Difference(
        before=HOSTILE,
        after=HOSTILE,
        same=False,
        tensors=(TensorDifference(key=HOSTILE, change=Change.ADDED, before=None, after=spec, bytes=8, changed=8),),
        facts=(FactDifference(path=HOSTILE, before=None, after={HOSTILE: [HOSTILE * 9]}),),
    )
    compared = parsed(comparison_page(changes, "N0"))
    assert not {"script", "img"} & set(compared.tags)
    assert compared.text.count("<script>alert(1)</script>") >= 5


def test_a_browser_is_given_a_comparison_as_a_page_of_its_own(run: tuple[Store, list[str]]) -> None:
    """What differs, tensors of repeated blocks in one row; and each way to fail has its own answer."""
    lister = StoreLister(lambda: run[0])
    failures: dict[str, Exception] = {
        "slow": StoreBusy("the store has not answered within 30 s; try again later"),
        "gone": NoCheckpoint("there is no checkpoint gone"),
        "away": StoreUnreachable("nobody\nanswers"),
    }

    def compare(before: str, after: str) -> Difference:
        if after in failures:
            raise failures[after]
        return lister.difference(before, after)

    with serving(compare=compare) as served:
        response, body = served.get(f"/difference?before={run[1][0]}&after=latest")
        assert response.status == 200
        assert "style-src 'nonce-" in response.headers["content-security-policy"]
        read = parsed(body.decode())
        assert_loads_nothing(body.decode())
        assert_usable_without_a_mouse(read)
        assert "model/blocks.{0..3}.mlp.weight" in read.text
        assert "schedule.lr" in read.text
        for after, status, said in (
            ("slow", 503, "try again later"),
            ("gone", 404, "no checkpoint gone"),
            ("away", 502, "nobody answers"),
        ):
            response, body = served.get(f"/difference?before=latest&after={after}")
            assert (response.status, said in body.decode()) == (status, True)
        assert served.get("/difference?before=latest")[0].status == 400
        assert served.get(f"/difference?before=latest&after={'x' * 600}")[0].status == 400
    with serving() as served:
        assert served.get("/difference?before=a&after=b")[0].status == 404
    with serving(token="secret", compare=compare) as served:
        assert served.get("/difference?before=100&after=latest")[0].status == 401


def test_what_was_found_has_its_evidence_where_the_folder_is_given(tmp_path: Path) -> None:
    """A bundle beside the event files is explained, though etcd has forgotten its verdict."""
    source, feed = Source(), ViewFeed()
    path = bundle(tmp_path, "3.0")
    read_for_browsers(source, feed, EventFolder(tmp_path)).look()
    told = feed.view()[1]["parts"]["findings"]
    assert "Generation 3 stood still after step 7: stopped" in told
    assert str(path) in told
