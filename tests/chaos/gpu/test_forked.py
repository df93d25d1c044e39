"""Children of a stage: what they inherit does not stop them."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from chaos.gpu.forked import Talk, in_child


def collect(talk: Talk) -> str:
    """Start a thread, which gets the stack of one that the parent has, and collect garbage."""
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    gc.collect()
    return "collected"


@pytest.mark.gloo
def test_a_child_does_not_end_the_store_of_a_world_that_failed() -> None:
    """An error's traceback keeps it in a cycle, and its end would wait for a thread that the child has not got."""
    gc.disable()
    try:
        kept: dict[str, Any] = {"store": TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)}
        kept["self"] = kept
        del kept
        assert in_child(collect, limit=20.0) == "collected"
    finally:
        gc.enable()
        gc.collect()
