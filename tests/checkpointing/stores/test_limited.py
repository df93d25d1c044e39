"""Uploads limited to a bandwidth."""

from __future__ import annotations

import itertools

import pytest

from checkpointing import Store, open_store
from checkpointing.stores.limited import Bandwidth, LimitedStore
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


class TestLimited(StoreContract):
    """The contract."""

    @pytest.fixture
    def store(self, inner: Store) -> Store:
        return LimitedStore(inner, Bandwidth(1e12))


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
