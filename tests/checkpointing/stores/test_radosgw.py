"""The store contract on another S3 server: Ceph's."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest

from checkpointing import Store, fence, open_checkpoint, open_store, verify
from checkpointing.errors import StoreDenied, StoreUnfit
from checkpointing.stores.fsspec import FsspecStore
from checkpointing.stores.obstore import ObstoreStore
from checkpointing.stores.probing import probe
from checkpointing.stores.register import RegisteredStore, StoreRegister
from tests.checkpointing.states import SMALL, load, make_state, save_and_commit
from tests.checkpointing.stores.ceph_server import missing, radosgw
from tests.checkpointing.stores.store_contract import StoreContract

pytestmark = [
    pytest.mark.s3,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason="needs ceph-mon, ceph-osd and radosgw, as Debian has them"),
    pytest.mark.long,
]

_numbers = itertools.count()


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with radosgw(tmp_path_factory.mktemp("ceph") / "cluster") as given:
        yield given


class TestRadosgw(StoreContract):
    """The contract: through obstore, and through s3fs with a register."""

    @pytest.fixture(params=["obstore", "s3fs"])
    def store(self, request: pytest.FixtureRequest, options: dict[str, Any]) -> Store:
        url = f"s3://bucket/contract-{next(_numbers)}/x"
        if request.param == "obstore":
            return open_store(url, options=options)
        # s3fs sends ETags in quotes, which this server never finds equal.
        register = StoreRegister(open_store(f"memory://radosgw-{next(_numbers)}/register"))
        return RegisteredStore(FsspecStore(url, options=options), register)


def test_checkpoints_work_on_radosgw(options: dict[str, Any]) -> None:
    """Save, commit, restore and verify."""
    store = open_store("s3://bucket/checkpoints", options=options)
    state = make_state(SMALL)
    fence(store, 1)
    save_and_commit(store, state)
    assert load(open_checkpoint(store))[0] == state
    assert list(verify(store)) == []


def test_large_objects_pass_the_check(options: dict[str, Any]) -> None:
    """Its ETags match S3's, for one request and for several parts."""
    store = ObstoreStore("s3://bucket/large", options=options)
    block = os.urandom(20 << 20)
    for data in (block, iter([block, block, block])):
        store.put("x", data, check=True)
    assert store.get("x") == block * 3


def test_radosgw_through_s3fs_needs_a_register(options: dict[str, Any]) -> None:
    """The probe says why."""
    with pytest.raises(StoreUnfit, match="compare-and-swap"):
        probe(FsspecStore("s3://bucket/refused", options=options))


def test_wrong_credentials_and_buckets_are_reported(options: dict[str, Any]) -> None:
    """This server does check signatures."""
    for client in (ObstoreStore, FsspecStore):
        with pytest.raises(StoreDenied):
            client("s3://bucket/x", options={**options, "secret": "wrong"}).get("x")
        with pytest.raises(StoreUnfit, match="no such bucket"):
            client("s3://nowhere/x", options=options).put("x", b"1")
