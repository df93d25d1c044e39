"""Retries: what is repeated, and what is read back instead."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from checkpointing import Store, open_store
from checkpointing.errors import Miswritten, StoreDenied, StoreError, StoreNotFound, StoreUnreachable
from checkpointing.stores.retrying import FIRST_CONTACT, RetryingStore, Trouble, policy
from tests.checkpointing.stores.flaky import Flaky, every_other
from tests.checkpointing.stores.store_contract import StoreContract

_numbers = itertools.count()


def retrying(store: Any, patience: float = 120.0) -> RetryingStore:
    return RetryingStore(store, patience, sleep=lambda _: None)


class Busy:
    """A store that answers with `error` until so many seconds have been slept, which `waits` records."""

    def __init__(self, seconds: float, error: StoreError) -> None:
        self.seconds, self.error = seconds, error
        self.waits: list[float] = []
        self.tries = 0

    def size(self, name: str) -> int:
        self.tries += 1
        if sum(self.waits) < self.seconds:
            raise self.error
        return 7

    def store(self, patience: float, **named: Any) -> RetryingStore:
        inner: Any = self
        return RetryingStore(inner, patience, sleep=self.waits.append, **named)


@pytest.fixture
def inner() -> Store:
    return open_store(f"memory://retrying-{next(_numbers)}/x")


class TestRetrying(StoreContract):
    """The contract, over a store that loses every other request or answer."""

    @pytest.fixture
    def store(self, inner: Store) -> Store:
        # Not `put`: data from a generator is sent once, and a failure there is the caller's to repeat. Not swaps:
        # one that is overtaken ends in an error.
        return retrying(Flaky(inner, every_other(), ("get", "read", "size", "list", "entries", "delete")))


def test_data_in_memory_is_sent_again(inner: Store) -> None:
    """A generator cannot be."""
    flaky = Flaky(inner, ["before", "after", "ok", "before"], ("put",))
    retrying(flaky).put("x", [b"a", b"b"])
    assert inner.get("x") == b"ab"
    assert len(flaky.calls) == 3
    with pytest.raises(StoreError, match="the request was lost"):
        retrying(flaky).put("x", (chunk for chunk in [b"c"]))


def test_permanent_errors_are_raised_at_once(inner: Store) -> None:
    """A missing object, a missing permission."""
    flaky = Flaky(inner, [], ("get",))
    with pytest.raises(StoreNotFound):
        retrying(flaky).get("x")
    assert len(flaky.calls) == 1
    assert not StoreDenied("").transient


@pytest.mark.parametrize("seconds", [2.0, 15.0, 119.0])
def test_a_busy_store_is_waited_for(seconds: float) -> None:
    """Limited by time, not by the number of tries."""
    busy = Busy(seconds, StoreError("503: SlowDown"))
    assert busy.store(120.0).size("x") == 7


@pytest.mark.parametrize("patience", [0.0, 1.0, 120.0])
def test_retries_end_when_patience_is_over(patience: float) -> None:
    """After a last try, with the error itself."""
    busy = Busy(1e9, StoreError("503: SlowDown"))
    with pytest.raises(StoreError, match="503: SlowDown"):
        busy.store(patience).size("x")
    assert sum(busy.waits) == pytest.approx(patience, abs=0.5)
    assert busy.tries == len(busy.waits) + 1


def test_an_address_that_never_answered_is_given_up_sooner() -> None:
    """It is probably wrong; once it has answered, even with a refusal, it is only away."""
    away = Busy(1e9, StoreUnreachable("connection refused"))
    with pytest.raises(StoreUnreachable):
        away.store(120.0).size("x")
    assert FIRST_CONTACT <= sum(away.waits) < 2 * FIRST_CONTACT + 1
    met = Busy(0.0, StoreUnreachable("connection refused"))
    store = met.store(120.0)
    assert store.size("x") == 7
    met.seconds = 60.0
    assert store.size("x") == 7
    assert sum(met.waits) >= 60.0


def test_a_long_wait_is_reported() -> None:
    """With the error, and how often and how long it was met."""
    troubles: list[Trouble] = []
    Busy(60.0, StoreError("503: SlowDown")).store(120.0, on_trouble=troubles.append).size("x")
    assert [trouble.error for trouble in troubles] == ["503: SlowDown"]
    assert troubles[0].seconds >= 5.0
    troubles.clear()
    Busy(1.0, StoreError("503: SlowDown")).store(120.0, on_trouble=troubles.append).size("x")
    assert not troubles


def test_bytes_that_always_arrive_changed_are_given_up_soon(inner: Store) -> None:
    """A few times are enough."""
    changed = Busy(1e9, Miswritten("not what was sent"))
    with pytest.raises(Miswritten):
        changed.store(120.0).size("x")
    assert changed.tries == 5


@pytest.mark.parametrize("patience", [-1.0, float("inf"), float("nan")])
def test_patience_must_be_a_finite_number_of_seconds(patience: float) -> None:
    """Nothing waits for ever."""
    with pytest.raises(ValueError, match="patience"):
        open_store(f"memory://retrying-{next(_numbers)}/x", patience=patience)


@pytest.mark.parametrize("faults", [["before"], ["after"], ["before", "after"], ["after", "after"]])
def test_a_creation_without_an_answer_is_resolved(inner: Store, faults: list[str]) -> None:
    """Whether the request or its answer was lost, it happened once and the creator is told so."""
    store = retrying(Flaky(inner, faults, ("put_if_absent",)))
    assert store.put_if_absent("a", b"mine")
    assert inner.get("a") == b"mine"


def test_a_creator_that_lost_is_told_so(inner: Store) -> None:
    """Another object was first, whatever became of the answers."""
    inner.put("a", b"theirs")
    assert not retrying(Flaky(inner, ["after"], ("put_if_absent",))).put_if_absent("a", b"mine")
    assert not retrying(Flaky(inner, ["before", "after"], ("put_if_absent",))).put_if_absent("a", b"mine")
    assert inner.get("a") == b"theirs"


@pytest.mark.parametrize("faults", [["before"], ["after"], ["before", "after"], ["before", "before", "after"]])
@pytest.mark.parametrize("present", [b"old", None])
def test_a_swap_without_an_answer_is_resolved(inner: Store, faults: list[str], present: bytes | None) -> None:
    """It was done once, and is reported as done."""
    token = None
    if present is not None:
        inner.put("a", present)
        stored = inner.read("a")
        token = stored.token if stored is not None else None
    store = retrying(Flaky(inner, faults, ("compare_and_swap",)))
    assert store.compare_and_swap("a", token, b"new")
    assert inner.get("a") == b"new"


def test_a_swap_that_was_overtaken_is_neither_won_nor_lost(inner: Store) -> None:
    """Returning False would deny a swap that was made and that another one was built on."""
    inner.put("a", b"old")
    stored = inner.read("a")
    assert stored is not None
    flaky = Flaky(inner, ["after"], ("compare_and_swap",), between=lambda: inner.put("a", b"built on ours"))
    with pytest.raises(StoreError, match="whether the swap was done is unknown"):
        retrying(flaky).compare_and_swap("a", stored.token, b"new")


def test_waits_between_tries_grow_and_are_random() -> None:
    """Each is anywhere between nothing and its bound."""
    busy = Busy(1e9, StoreError("503"))
    with pytest.raises(StoreError):
        policy(lambda: 60.0, first=1.0, longest=3.0, sleep=busy.waits.append)(lambda: busy.size("x"))
    bounds = itertools.chain([1.0, 2.0], itertools.repeat(3.0))
    assert all(0 <= wait <= bound for wait, bound in zip(busy.waits, bounds, strict=False))
    assert len(set(busy.waits)) > 10
    assert min(busy.waits) < 1.0


def test_waits_are_drawn_from_no_generator_that_a_script_may_use() -> None:
    """Samples that are read from a store are made by what the global one draws next."""
    before = random.getstate()
    with pytest.raises(StoreError):
        Busy(1e9, StoreError("503")).store(60.0).size("x")
    assert random.getstate() == before
