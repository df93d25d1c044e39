"""Checkpoints on a real S3 server over HTTP."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import chaos.servers.s3
import checkpointing.stores.fsspec
import checkpointing.stores.obstore
from chaos.servers.s3_proxy import ALWAYS, Do, Harm, S3Proxy, s3_proxy
from checkpointing import Box, Store, TensorSpec, commit, fence, open_checkpoint, open_store, verify
from checkpointing.errors import Corrupt, Fenced, Miswritten, StoreDenied, StoreError, StoreUnfit
from checkpointing.format.pack import Content, plan_pack
from checkpointing.format.tiles import digest
from checkpointing.saving.uploading import is_there, upload
from checkpointing.stores.fsspec import FsspecStore
from checkpointing.stores.obstore import ObstoreStore
from checkpointing.stores.probing import probe
from checkpointing.stores.retrying import RetryingStore
from tests.checkpointing.states import SMALL, load, make_state, save, save_and_commit
from tests.checkpointing.stores.store_contract import StoreContract

pytestmark = pytest.mark.s3

_numbers = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[chaos.servers.s3.S3Server]:
    with chaos.servers.s3.s3_server() as server:
        yield server


@pytest.fixture
def options(server: chaos.servers.s3.S3Server) -> dict[str, Any]:
    return server.options


@pytest.fixture
def store(options: dict[str, Any], request: pytest.FixtureRequest) -> Store:
    return open_store(f"s3://bucket/{request.node.name}", options=options)


def test_checkpoints_work_on_s3(store: Store) -> None:
    """Save, commit, restore, fence and verify, as on a disk."""
    state = make_state(SMALL)
    fence(store, 1)
    first = save_and_commit(store, state)
    assert load(open_checkpoint(store))[0] == state
    save(store, make_state(SMALL, seed=1), step=2)
    assert fence(store, 2).checkpoint == first.checkpoint
    with pytest.raises(Fenced):
        commit(store, step=2, made_in=1, attempt=0, committed_in=1, world=2)
    commit(store, step=2, made_in=1, attempt=0, committed_in=2, world=2)
    assert load(open_checkpoint(store))[0] == make_state(SMALL, seed=1)
    assert list(verify(store)) == []


class TestS3(StoreContract):
    """The contract, over HTTP, through either client."""

    @pytest.fixture(params=["obstore", "s3fs"])
    def store(self, request: pytest.FixtureRequest, options: dict[str, Any]) -> Store:
        client = {"obstore": ObstoreStore, "s3fs": FsspecStore}[request.param]
        return client(f"s3://bucket/contract-{next(_numbers)}/x", options=options)


@pytest.mark.parametrize("client", [ObstoreStore, FsspecStore])
def test_a_pack_larger_than_a_part_is_uploaded_in_parts(
    options: dict[str, Any], client: type[ObstoreStore | FsspecStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks become parts of one object, which passes the check of the whole."""
    monkeypatch.setattr(checkpointing.stores.fsspec, "_BLOCK", 5 << 20)
    monkeypatch.setattr(checkpointing.stores.obstore, "_PART", 5 << 20)
    monkeypatch.setattr(checkpointing.stores.obstore, "_SINGLE", 7 << 20)
    monkeypatch.setattr(checkpointing.stores.obstore, "_HELD", 6 << 20)
    store = client(f"s3://bucket/large-{client.__name__}", options=options)
    blocks = [os.urandom(4 << 20) for _ in range(4)]
    for data in (iter(blocks), blocks):
        store.put("packs/large", data, check=True)
        assert store.size("packs/large") == 16 << 20
    assert store.get("packs/large", (4 << 20) - 3, (4 << 20) + 3) == blocks[0][-3:] + blocks[1][:3]


@pytest.mark.parametrize("client", [ObstoreStore, FsspecStore])
def test_a_pack_of_which_a_tile_changes_is_not_there_in_any_part(
    options: dict[str, Any], client: type[ObstoreStore | FsspecStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last tile does not have its digest when it is sent, after parts of the pack were: the error names it."""
    monkeypatch.setattr(checkpointing.stores.fsspec, "_BLOCK", 5 << 20)
    monkeypatch.setattr(checkpointing.stores.obstore, "_PART", 5 << 20)
    monkeypatch.setattr(checkpointing.stores.obstore, "_HELD", 6 << 20)
    store = client(f"s3://bucket/changed-{client.__name__}", options=options)
    spec = TensorSpec(key="w", dtype="uint8", shape=(4, 4 << 20))
    boxes = [Box(start=(n, 0), stop=(n + 1, 4 << 20)) for n in range(4)]
    blocks = [bytearray(os.urandom(4 << 20)) for _ in boxes]
    plan = plan_pack(
        [
            Content(spec=spec, box=box, digest=digest(spec, box, block), data=memoryview(block))
            for box, block in zip(boxes, blocks, strict=True)
        ]
    )
    blocks[-1][7] ^= 1
    with pytest.raises(Corrupt, match=r"w \[3:4, .* changed in memory"):
        upload(store, plan, check=True)
    assert list(store.list("")) == []
    blocks[-1][7] ^= 1
    upload(store, plan, check=True)
    assert is_there(store, plan)


def test_a_missing_bucket_is_named(options: dict[str, Any]) -> None:
    """The message names the store and its problem, with every client."""
    with pytest.raises(StoreUnfit, match=r"s3://nowhere.*no such bucket"):
        open_store("s3://nowhere/x", options=options)
    with pytest.raises(StoreUnfit, match=r"s3://nowhere.*no such bucket"):
        probe(FsspecStore("s3://nowhere/x", options=options))
    with pytest.raises(StoreUnfit, match="no such bucket"):
        open_store("s3://nowhere/x", options=options, write=False).read("refs/latest")


def test_a_forked_process_does_not_block(options: dict[str, Any]) -> None:
    """obstore's threads stay in the parent: the child gets an error, and its own store uses another client."""
    store = ObstoreStore("s3://bucket/forked", options=options)
    store.put("x", b"1")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            try:
                store.get("x")
            except StoreUnfit as error:
                os.write(writing, str(error).encode() + b"\n")
            os.write(writing, type(open_store("s3://bucket/forked", options=options, write=False)).__name__.encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with open(reading, "rb") as said:
        lines = said.read().decode().splitlines()
    assert "Open the store again here" in lines[0]
    assert lines[1] == "RetryingStore"
    assert store.get("x") == b"1"


CLIENTS = [ObstoreStore, FsspecStore]
Client = type[ObstoreStore | FsspecStore]


@pytest.fixture
def wire(server: chaos.servers.s3.S3Server) -> Iterator[S3Proxy]:
    with s3_proxy(server.port) as wire:
        yield wire


def through(wire: S3Proxy, client: Client = ObstoreStore) -> ObstoreStore | FsspecStore:
    return client(f"s3://bucket/wire-{next(_numbers)}", options=chaos.servers.s3.options(wire.port))


@pytest.mark.parametrize("client", CLIENTS)
def test_a_server_that_ignores_conditions_is_detected(wire: S3Proxy, client: Client) -> None:
    """At once, by a probe, before anything of value is there."""
    wire.harms.append(Harm(do=Do.STRIP, method="PUT", times=ALWAYS))
    with pytest.raises(StoreUnfit, match="create-only writes"):
        probe(through(wire, client))


@pytest.mark.parametrize("client", CLIENTS)
def test_a_missing_permission_is_reported(wire: S3Proxy, client: Client) -> None:
    """It is not tried again, and the message says where to look."""
    store = through(wire, client)
    wire.harms.append(Harm(do=Do.DENY, times=ALWAYS))
    with pytest.raises(StoreDenied, match="credentials"):
        RetryingStore(store, sleep=lambda _: None).put("x", b"1")
    with pytest.raises(StoreUnfit, match="credentials"):
        probe(store)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_clock_that_is_far_off_is_named(wire: S3Proxy, client: Client) -> None:
    """It is not the credentials, though the store answers as if they were wrong. (An answer to HEAD says no more.)"""
    store = through(wire, client)
    wire.harms.append(Harm(do=Do.SKEWED, times=ALWAYS))
    with pytest.raises(StoreDenied, match="Set the clock") as denied:
        store.put("x", b"1")
    assert "credentials" not in str(denied.value)


@pytest.mark.parametrize("client", CLIENTS)
def test_bytes_changed_in_transit_are_sent_again(wire: S3Proxy, client: Client) -> None:
    """A checked write compares what the server has."""
    store = through(wire, client)
    body = os.urandom(1000)
    wire.harms.append(Harm(do=Do.FLIP_REQUEST, method="PUT"))
    with pytest.raises(Miswritten, match="not what was sent"):
        store.put("x", [body], check=True)
    wire.harms.append(Harm(do=Do.FLIP_REQUEST, method="PUT", times=2))
    RetryingStore(store, sleep=lambda _: None).put("x", [body], check=True)
    assert store.get("x") == body


@pytest.mark.parametrize("do", [Do.REFUSE, Do.UNANSWERED, Do.BUSY])
def test_a_lost_or_refused_request_is_retried(wire: S3Proxy, do: Do) -> None:
    """Create, swap, write, read and list each happen once, although every first request fails on the wire."""
    store = RetryingStore(through(wire), sleep=lambda _: None)
    calls: list[Callable[[], Any]] = [
        lambda: store.put("packs/x", b"1"),
        lambda: store.put_if_absent("a", b"1"),
        lambda: store.compare_and_swap("a", getattr(store.read("a"), "token", None), b"2"),
        lambda: store.get("a"),
        lambda: list(store.list("")),
        lambda: store.delete("packs/x"),
    ]
    results = []
    for call in calls:
        wire.harms.append(Harm(do=do))
        results.append(call())
    assert results == [None, True, True, b"2", ["a", "packs/x"], None]
    assert len(wire.done) == len(calls)
    assert list(store.list("")) == ["a"]


def test_a_busy_server_is_waited_for(wire: S3Proxy) -> None:
    """For more than a handful of tries, with plain and conditional writes and reads."""
    store = RetryingStore(through(wire), sleep=lambda _: None)
    calls: list[Callable[[], Any]] = [
        lambda: store.put("packs/x", b"1"),
        lambda: store.put_if_absent("a", b"1"),
        lambda: store.get("a"),
    ]
    for call in calls:
        wire.harms.append(Harm(do=Do.BUSY, times=12))
        call()
    assert len(wire.done) == 36
    assert (store.get("packs/x"), store.get("a")) == (b"1", b"1")


def test_a_refused_part_is_sent_again_alone(wire: S3Proxy) -> None:
    """Although the data comes only once."""
    store = open_store(f"s3://bucket/wire-{next(_numbers)}", options=chaos.servers.s3.options(wire.port), write=False)
    block = os.urandom(1 << 20)
    wire.harms += [
        Harm(do=Do.BUSY, method="PUT", path="partNumber=2", times=2),
        Harm(do=Do.DELAY, method="PUT", path="partNumber=", seconds=0.0, times=ALWAYS),
    ]
    store.put("x", (block for _ in range(48)), check=True)
    assert [done.do for done in wire.done].count(Do.DELAY) == 3
    assert store.size("x") == 48 << 20


@pytest.mark.parametrize("client", CLIENTS)
def test_error_texts_are_not_parsed_for_codes(client: Client) -> None:
    """A server's error whose text happens to contain 412, 416 or the name of a code stays an error."""
    text = "request 412-416 InvalidRange PreconditionFailed NoSuchBucket AccessDenied"
    body = f"<Error><Code>Odd</Code><Message>{text}</Message></Error>".encode()
    with answering(400, body) as port:
        options = {**chaos.servers.s3.options(port), "client_kwargs": {"region_name": "us-east-1"}}
        store = client(f"s3://bucket/numbers-{next(_numbers)}", options=options)
        calls: list[Callable[[], Any]] = [
            lambda: store.put_if_absent("x", b"1"),
            lambda: store.compare_and_swap("x", '"token"', b"1"),
            lambda: store.get("x", 3, 5),
        ]
        for call in calls:
            with pytest.raises(StoreError) as raised:
                call()
            assert type(raised.value) is StoreError


@contextlib.contextmanager
def answering(status: int, body: bytes) -> Iterator[int]:
    """Give every request of a client the same answer; yield the port."""

    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_GET  # noqa: N815 (http.server's names)

        def log_message(self, format: str, *arguments: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_commits_survive_a_bad_network(wire: S3Proxy) -> None:
    """A save and its commit, with every fifth request or answer lost."""
    store = RetryingStore(through(wire), sleep=lambda _: None)
    state = make_state(SMALL)
    wire.harms.append(Harm(do=Do.UNANSWERED, skip=3, every=5, times=ALWAYS))
    fence(store, 1)
    save_and_commit(store, state)
    assert load(open_checkpoint(store))[0] == state
    assert wire.done
