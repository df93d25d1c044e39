"""Of writers that give the same condition, one wins."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from chaos.servers.atomic_s3 import Atomic

ETAG = {"HTTP_IF_MATCH": "old"}


class Server:
    """Looks at a condition, waits until others may have looked too, and writes."""

    def __init__(self) -> None:
        self.etag = "old"
        self.looked = threading.Barrier(2)
        self.won: list[str] = []

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        meets = "HTTP_IF_MATCH" not in environ or environ["HTTP_IF_MATCH"] == self.etag
        try:
            self.looked.wait(0.2)
        except threading.BrokenBarrierError:
            self.looked.reset()
        if meets:
            self.etag = environ["wsgi.input"].read().decode()
            self.won.append(self.etag)
        return []


def request(body: str, **more: Any) -> dict[str, Any]:
    return {"REQUEST_METHOD": "PUT", "CONTENT_LENGTH": str(len(body)), "wsgi.input": io.BytesIO(body.encode()), **more}


@pytest.mark.parametrize(("conditions", "winners"), [(ETAG, 1), ({}, 2)], ids=["conditional", "plain"])
def test_one_of_two_writers_with_a_condition_wins(conditions: dict[str, str], winners: int) -> None:
    """Writes without a condition go on beside each other."""
    server = Server()
    application: Any = Atomic(server)  # type: ignore[arg-type]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda body: application(request(body, **conditions), None), ("a", "b")))
    assert len(server.won) == winners


def test_whoever_sends_slowly_holds_up_nobody() -> None:
    """A body is read before the condition is looked at."""
    server, sent = Server(), threading.Event()
    application: Any = Atomic(server)  # type: ignore[arg-type]

    class Slow(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            sent.wait(60)
            return super().read(size)

    slow = {**request("slow", **ETAG), "wsgi.input": Slow(b"slow")}
    thread = threading.Thread(target=application, args=(slow, None))
    thread.start()
    try:
        application(request("quick", **ETAG), None)
        assert server.won == ["quick"]
    finally:
        sent.set()
        thread.join()
    assert server.won == ["quick"]
