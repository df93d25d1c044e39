"""Uploads limited to a bandwidth, and slow requests that are raced by a second one."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from checkpointing import Store, open_store
from checkpointing.errors import StoreError
from checkpointing.stores.hedged import HedgedStore
from checkpointing.stores.limited import Bandwidth, LimitedStore
from tests.checkpointing.stores.flaky import Flaky
from tests.checkpointing.stores.store_contract import StoreContract

_numbers = itertools.count()


class Time:
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def inner() -> Store:
    return open_store(f"memory://limited-{next(_numbers)}/x")


@pytest.fixture
def hedged(inner: Store) -> Iterator[HedgedStore]:
    store = HedgedStore(inner)
    yield store
    store.close()


class TestLimited(StoreContract):
    """The contract."""

    @pytest.fixture
    def store(self, inner: Store) -> Store:
        return LimitedStore(inner, Bandwidth(1e12))


class TestHedged(StoreContract):
    """The contract."""

    @pytest.fixture
    def store(self, hedged: HedgedStore) -> Store:
        return hedged


@pytest.mark.parametrize("size", [1, 999, 100_000])
def test_an_upload_keeps_its_bandwidth(inner: Store, size: int) -> None:
    """Its bytes over the rate, except for the burst, in one chunk or many."""
    for data in (bytes(size), [bytes(7)] * (size // 7)):
        time = Time()
        LimitedStore(inner, Bandwidth(1000, burst=100, clock=time.clock, sleep=time.sleep)).put("x", data)
        assert time.now == pytest.approx(max(0, (inner.size("x") - 100) / 1000))


def test_a_bandwidth_limit_is_shared() -> None:
    """Two uploads take as long as one of both sizes together."""
    time = Time()
    bandwidth = Bandwidth(1000, burst=1, clock=time.clock, sleep=time.sleep)
    for _ in range(2):
        LimitedStore(open_store(f"memory://limited-{next(_numbers)}/x"), bandwidth).put("x", bytes(500))
    assert time.now == pytest.approx(1.0, abs=0.01)


def test_unused_bandwidth_is_not_saved_up() -> None:
    """After a pause no more than the burst is sent at once."""
    time = Time()
    bandwidth = Bandwidth(1000, burst=100, clock=time.clock, sleep=time.sleep)
    time.now = 1e6
    bandwidth.take(1100)
    assert time.now == pytest.approx(1e6 + 1.0)


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_bandwidth_must_be_positive(rate: float) -> None:
    """Zero would wait for ever."""
    with pytest.raises(ValueError, match="positive"):
        Bandwidth(rate)


def test_a_slow_read_is_raced_by_a_second(inner: Store) -> None:
    """Once the usual time of reads is known; the caller gets the first good answer."""
    stuck, asked = threading.Event(), itertools.count()

    class Stalling:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
            if next(asked) == 20:
                stuck.wait(30)
            return inner.get(name, start, stop)

    stalling: Any = Stalling()
    store = HedgedStore(stalling, patience=0.01)
    inner.put("x", b"hello")
    try:
        assert all(store.get("x", 0, 5) == b"hello" for _ in range(30))
        assert store.hedges >= 1
    finally:
        stuck.set()
        store.close()


def test_an_error_is_not_hidden_by_racing(inner: Store) -> None:
    """It is raised unchanged."""
    flaky: Any = Flaky(inner, itertools.repeat("before"), ("put",))
    store = HedgedStore(flaky)
    with pytest.raises(StoreError, match="the request was lost"):
        store.put("x", b"1")
    store.close()
