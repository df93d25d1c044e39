"""Trying again: what is repeated, and what is read back instead."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from flaky import Flaky, every_other
from store_contract import StoreContract

from checkpointing import Store, open_store
from checkpointing.errors import StoreDenied, StoreError, StoreNotFound
from checkpointing.stores.retrying import RetryingStore, policy

_numbers = itertools.count()


def retrying(store: Any) -> RetryingStore:
    return RetryingStore(store, policy(sleep=lambda _: None))


@pytest.fixture
def inner() -> Store:
    return open_store(f"memory://retrying-{next(_numbers)}/x")


class TestRetrying(StoreContract):
    """The contract, over a store that loses every other request or answer."""

    @pytest.fixture
    def store(self, inner: Store) -> Store:
        # Not `put`: data that comes once is sent once, and what breaks off there is the caller's to repeat. Not swaps:
        # one that is overtaken ends in an error.
        return retrying(Flaky(inner, every_other(), ("get", "read", "size", "list", "entries", "delete")))


def test_data_in_memory_is_sent_again(inner: Store) -> None:
    """A generator is not: it cannot be."""
    flaky = Flaky(inner, ["before", "after", "ok", "before"], ("put",))
    retrying(flaky).put("x", [b"a", b"b"])
    assert inner.get("x") == b"ab"
    assert len(flaky.calls) == 3
    with pytest.raises(StoreError, match="the request was lost"):
        retrying(flaky).put("x", (chunk for chunk in [b"c"]))


def test_what_trying_cannot_mend_is_raised_at_once(inner: Store) -> None:
    """A missing object, a missing permission."""
    flaky = Flaky(inner, [], ("get",))
    with pytest.raises(StoreNotFound):
        retrying(flaky).get("x")
    assert len(flaky.calls) == 1
    assert not StoreDenied("").transient


def test_it_gives_up(inner: Store) -> None:
    """After its tries, with the error itself."""
    flaky = Flaky(inner, itertools.repeat("before"), ("get",))
    with pytest.raises(StoreError, match="the request was lost"):
        retrying(flaky).get("x")
    assert len(flaky.calls) == 5


@pytest.mark.parametrize("faults", [["before"], ["after"], ["before", "after"], ["after", "after"]])
def test_a_creation_is_resolved(inner: Store, faults: list[str]) -> None:
    """Whether the request or its answer was lost, the creator is told so, and it happened once."""
    store = retrying(Flaky(inner, faults, ("put_if_absent",)))
    assert store.put_if_absent("a", b"mine")
    assert inner.get("a") == b"mine"


def test_a_creation_that_lost_is_told(inner: Store) -> None:
    """The other's object was first, whatever became of the answers."""
    inner.put("a", b"theirs")
    assert not retrying(Flaky(inner, ["after"], ("put_if_absent",))).put_if_absent("a", b"mine")
    assert not retrying(Flaky(inner, ["before", "after"], ("put_if_absent",))).put_if_absent("a", b"mine")
    assert inner.get("a") == b"theirs"


@pytest.mark.parametrize("faults", [["before"], ["after"], ["before", "after"], ["before", "before", "after"]])
@pytest.mark.parametrize("present", [b"old", None])
def test_a_swap_is_resolved(inner: Store, faults: list[str], present: bytes | None) -> None:
    """Done once, and said so."""
    token = None
    if present is not None:
        inner.put("a", present)
        found = inner.read("a")
        token = found.token if found is not None else None
    store = retrying(Flaky(inner, faults, ("compare_and_swap",)))
    assert store.compare_and_swap("a", token, b"new")
    assert inner.get("a") == b"new"


def test_a_swap_that_was_overtaken_is_neither_won_nor_lost(inner: Store) -> None:
    """Saying False would deny a swap that was done, and that another one was built upon."""
    inner.put("a", b"old")
    found = inner.read("a")
    assert found is not None
    flaky = Flaky(inner, ["after"], ("compare_and_swap",), between=lambda: inner.put("a", b"built on ours"))
    with pytest.raises(StoreError, match="whether the swap was done is unknown"):
        retrying(flaky).compare_and_swap("a", found.token, b"new")


def test_waits_grow_and_are_random(inner: Store) -> None:
    """Within their bounds."""
    waited: list[float] = []
    flaky = Flaky(inner, ["before"] * 4, ("size",))
    inner.put("a", b"1")
    assert RetryingStore(flaky, policy(first=1.0, longest=3.0, sleep=waited.append)).size("a") == 1  # type: ignore[arg-type]
    assert len(waited) == 4
    assert all(0 <= wait <= bound for wait, bound in zip(waited, [1, 2, 3, 3], strict=True))
