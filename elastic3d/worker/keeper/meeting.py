"""The store in which the process groups of a generation meet: torch's, served by the keeper of the node of rank 0.

torch's TCPStore would listen on every interface, speaks with whoever connects, and keeps for ever what was put into it.
Here it listens on the node's own address alone, the one its other ports are on, and forgets a generation when the next
one begins. Who reaches that address can still read and write it, as the ports of gloo and NCCL can be spoken to: they
need a private network (SECURITY.md). Nothing that lies in it is ever unpickled.
"""

from __future__ import annotations

import queue
import socket

from elastic3d import threads


class Meeting:
    """Serves from its beginning to `close`. port: on the given address; OSError where that is not this host's."""

    def __init__(self, address: str) -> None:
        from torch._C._distributed_c10d import TCPStore

        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=4096)
        self.port: int = listener.getsockname()[1]
        self._store: TCPStore | None = TCPStore(
            address,
            self.port,
            is_master=True,
            wait_for_workers=False,
            use_libuv=True,
            master_listen_fd=listener.detach(),
        )
        self._over: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        # What stays behind costs memory only.
        self._thread = threads.start(self._run, name="elastic3d-meeting", edge=threads.Edge.AGAIN)

    def forget(self, before: int) -> None:
        """Have the keys of all generations before this one deleted, soon: their groups are no more."""
        self._over.put(before)

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._over.put(None)
        self._thread.join(timeout=10)
        self._store = None

    def keys(self) -> list[str]:
        """Return what lies in the store."""
        assert self._store is not None
        return list(self._store.list_keys())

    def _run(self) -> None:
        while (before := self._over.get()) is not None:
            self._delete(before)

    def _delete(self, before: int) -> None:
        store = self._store
        if store is None or not hasattr(store, "list_keys"):
            # An older torch cannot say what lies there.
            return
        for key in store.list_keys():
            # As a PrefixStore under `Generation.key` writes them: number.attempt/name.
            number, dot, _ = key.partition("/")[0].partition(".")
            if dot and number.isdecimal() and int(number) < before:
                store.delete_key(key)
