"""Whether all ranks make the same call."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from torch._C._distributed_c10d import HashStore

from elastic3d.errors import UsageError
from elastic3d.parallel.all_ranks import AllRanks, unmatched
from elastic3d.parallel.peer_errors import is_lost_peer


def together(*work: Callable[[], None]) -> None:
    """Run all at once, each on a thread of its own."""
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)


def test_ranks_that_make_the_same_calls_meet() -> None:
    """However often, and leaving nothing behind: an evaluation is thousands of passes."""
    store = HashStore()
    ranks = [AllRanks(store, rank=rank, world=3) for rank in range(3)]

    def evaluate(rank: AllRanks) -> None:
        for call in ["model(...)", "run.digest()"] * 20:
            rank.meet(call, patience=60.0)

    together(*(lambda rank=rank: evaluate(rank) for rank in ranks))
    assert store.num_keys() <= 2
    assert ranks[0].returned() is None


def test_a_rank_whose_main_has_returned_is_not_waited_for() -> None:
    """It is named, and so is the call."""
    store = HashStore()
    AllRanks(store, rank=1, world=2).say_returned(7)
    rank = AllRanks(store, rank=0, world=2)
    assert rank.returned() == (1, 7)
    with pytest.raises(UsageError, match=r"model\(x\) was called on rank 0 when main had returned on rank 1 already"):
        rank.meet("model(x)", patience=60.0)


def test_ranks_at_different_calls_do_not_meet() -> None:
    """Each reports the call at which it waited."""
    store, said = HashStore(), []

    def call(rank: int, what: str) -> None:
        with pytest.raises(UsageError) as caught:
            AllRanks(store, rank=rank, world=2).meet(what, patience=0.0)
        said.append(str(caught.value).partition(",")[0])

    together(lambda: call(0, "model(x)"), lambda: call(1, "run.digest()"))
    assert sorted(said) == ["model(x) was called on rank 0", "run.digest() was called on rank 1"]


def test_a_recognised_mismatch_is_no_lost_peer() -> None:
    """Whatever collective failed before it."""
    lost = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
    assert is_lost_peer(lost)
    error = unmatched(0, 1, 7)
    error.__cause__ = lost
    assert not is_lost_peer(error)
