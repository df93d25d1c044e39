"""The contract of every store. A subclass provides a fixture `store`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from checkpointing import Store
from checkpointing.errors import StoreError, StoreNotFound
from checkpointing.stores.retrying import RetryingStore

ODD_NAMES = ["../x", "a/../b", "/etc/passwd", "", "a//b", "a/", ".", "a\0b", "a b"]


class StoreContract:
    """The promises of `checkpointing.stores.protocol.Store`."""

    def test_objects_are_read_back(self, store: Store) -> None:
        """Whole, by ranges, and by size; replaced by a second write; absent after deletion, which may be repeated."""
        store.put("packs/ab/x.pack", [b"hello", memoryview(b" wor"), b"ld"])
        store.put("packs/cd/y.pack", b"")
        assert store.get("packs/ab/x.pack") == b"hello world"
        assert store.get("packs/cd/y.pack") == b""
        assert (store.size("packs/ab/x.pack"), store.size("packs/cd/y.pack")) == (11, 0)
        store.put("packs/ab/x.pack", b"other")
        assert store.get("packs/ab/x.pack") == b"other"
        store.delete("packs/ab/x.pack")
        store.delete("packs/ab/x.pack")
        assert store.read("packs/ab/x.pack") is None
        for ask in (store.get, store.size):
            with pytest.raises(StoreNotFound):
                ask("packs/ab/x.pack")
        with pytest.raises(StoreNotFound):
            store.get("packs/ab/x.pack", 1, 2)

    def test_ranges_are_clipped_like_slices(self, store: Store) -> None:
        """A range that passes the end, or lies beyond it, returns what there is."""
        store.put("x", b"hello world")
        for start, stop in [(0, 5), (3, 8), (0, 99), (9, 99), (11, 12), (40, 50), (4, 4), (5, 2)]:
            assert store.get("x", start, stop) == b"hello world"[start:stop], (start, stop)
            assert store.get("x", start) == b"hello world"[start:], start

    def test_data_may_come_in_any_chunks(self, store: Store) -> None:
        """A generator, wide memoryviews, empty chunks, none at all."""
        wide = memoryview(bytes(range(16))).cast("I")
        store.put("x", (chunk for chunk in (b"", wide, b"end")))
        assert store.get("x") == bytes(range(16)) + b"end"
        store.put("x", iter(()))
        assert store.get("x") == b""
        store.put("x", wide)
        assert store.get("x") == bytes(range(16))

    def test_data_that_breaks_off_leaves_the_old_object(self, store: Store) -> None:
        """A write is whole or did not happen."""

        def broken() -> Iterator[bytes]:
            yield b"half"
            raise ArithmeticError("the source failed")

        store.put("old", b"old")
        for name in ("old", "new"):
            with pytest.raises(ArithmeticError):
                store.put(name, broken())
        assert store.get("old") == b"old"
        assert list(store.list("")) == ["old"]

    def test_a_checked_write_is_compared(self, store: Store) -> None:
        """An intact upload passes, in one piece and in chunks."""
        store.put("x", b"hello", check=True)
        store.put("y", (chunk for chunk in (b"hello", b" world")), check=True)
        store.put("z", b"", check=True)
        assert [store.get(name) for name in ("x", "y", "z")] == [b"hello", b"hello world", b""]

    def test_listings_are_sorted_by_name_and_begin_with_the_prefix(self, store: Store) -> None:
        """A prefix may end within a name; sizes are those of the objects; times are the store's and never 0."""
        for name in ("packs/ab/x.pack", "packs/cd/y.pack", "refs/latest", "packs/ab-c"):
            store.put(name, name.encode())
        names = sorted(["packs/ab/x.pack", "packs/cd/y.pack", "refs/latest", "packs/ab-c"])
        assert list(store.list("")) == names
        assert list(store.list("packs/a")) == ["packs/ab-c", "packs/ab/x.pack"]
        assert list(store.list("packs/ab/")) == ["packs/ab/x.pack"]
        assert list(store.list("nothing/")) == []
        entries = list(store.entries(""))
        assert [(entry.name, entry.size) for entry in entries] == [(name, len(name)) for name in names]
        assert all(entry.modified > 1e9 for entry in entries)

    def test_times_come_from_one_clock(self, store: Store) -> None:
        """A later write is not older; a rewrite is a new object."""
        store.put("a", b"1")
        store.put("b", b"1")
        store.put("a", b"2")
        modified = {entry.name: entry.modified for entry in store.entries("")}
        assert modified["a"] >= modified["b"]

    def test_conditional_writes_need_absence_or_the_present_token(self, store: Store) -> None:
        """Created once; swapped only with the present token."""
        assert store.put_if_absent("a", b"1")
        assert not store.put_if_absent("a", b"2")
        first = store.read("a")
        assert first is not None
        assert first.data == b"1"
        assert not store.compare_and_swap("a", None, b"2")
        assert store.compare_and_swap("a", first.token, b"2")
        assert not store.compare_and_swap("a", first.token, b"3")
        assert not store.compare_and_swap("b", first.token, b"3")
        assert store.read("b") is None
        assert store.get("a") == b"2"
        second = store.read("a")
        assert second is not None
        assert second.token != first.token
        assert store.compare_and_swap("b", None, b"4")
        assert store.get("b") == b"4"
        assert list(store.list("")) == ["a", "b"]

    def test_a_deleted_object_can_be_created_but_not_swapped(self, store: Store) -> None:
        """Deletion ends the life of a token."""
        assert store.put_if_absent("a", b"1")
        first = store.read("a")
        assert first is not None
        store.delete("a")
        assert not store.compare_and_swap("a", first.token, b"2")
        assert store.put_if_absent("a", b"3")
        assert store.get("a") == b"3"

    def test_of_many_creators_one_succeeds(self, store: Store) -> None:
        """And its object is there."""
        with ThreadPoolExecutor(4) as pool:
            won = list(pool.map(lambda number: store.put_if_absent("a", str(number).encode()), range(8)))
        assert won.count(True) == 1
        assert store.get("a") == str(won.index(True)).encode()

    def test_swaps_from_many_threads_lose_nothing(self, store: Store) -> None:
        """A log that is only swapped holds exactly the lines whose writers were told that they won.

        Some servers answer a race with an error: a read is repeated then, as in a run, and a writer that is told
        nothing finds out by reading.
        """
        assert store.compare_and_swap("log", None, b"")
        patient = RetryingStore(store)

        def add(writer: int) -> list[str]:
            won = []
            for number in range(8):
                line, log = f"{writer}.{number}", patient.read("log")
                assert log is not None
                try:
                    done = store.compare_and_swap("log", log.token, log.data + f"{line}\n".encode())
                except StoreError:
                    done = line in patient.get("log").decode().split()
                if done:
                    won.append(line)
            return won

        with ThreadPoolExecutor(4) as pool:
            won = [line for lines in pool.map(add, range(4)) for line in lines]
        assert sorted(won) == sorted(store.get("log").decode().split())
        assert len(won) >= 8

    def test_names_cannot_leave_the_store(self, store: Store) -> None:
        """Only plain relative names are objects."""
        for name in ODD_NAMES:
            with pytest.raises(ValueError, match="not the name"):
                store.put(name, b"x")
            with pytest.raises(ValueError, match="not the name"):
                store.get(name)
