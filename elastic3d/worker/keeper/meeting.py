"""The store in which the process groups of a generation meet: torch's, served by the keeper of the node of rank 0.

By default torch's TCPStore listens on every interface, serves whoever connects, and keeps what is put into it for ever.
Here it listens only on the node's own address, like the node's other ports, and forgets a generation when the next one
begins. Anybody who reaches that address can still read and write it, just as they can talk to the ports of gloo and
NCCL: all of these need a private network (SECURITY.md). Nothing in the store is ever unpickled.
"""

from __future__ import annotations

import queue
import socket

from elastic3d import threads


class Meeting:
    """Serves until `close`. port: on the given address. OSError if the address is not this host's."""

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
        # Keys that are left behind cost only memory.
        self._thread = threads.start(self._run, name="elastic3d-meeting", edge=threads.Edge.AGAIN)

    def forget(self, before: int) -> None:
        """Have the keys of all generations before this one deleted soon: their process groups are gone."""
        self._over.put(before)

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._over.put(None)
        self._thread.join(timeout=10)
        self._store = None

    def keys(self) -> list[str]:
        """Return the keys in the store."""
        assert self._store is not None
        return list(self._store.list_keys())

    def _run(self) -> None:
        while (before := self._over.get()) is not None:
            self._delete(before)

    def _delete(self, before: int) -> None:
        store = self._store
        if store is None or not hasattr(store, "list_keys"):
            # An older torch cannot list the keys.
            return
        for key in store.list_keys():
            # As a PrefixStore under `Generation.key` writes them: number.attempt/name.
            number, dot, _ = key.partition("/")[0].partition(".")
            if dot and number.isdecimal() and int(number) < before:
                store.delete_key(key)
