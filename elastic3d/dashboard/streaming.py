"""Server-sent events to one browser: sent as far as it reads, and no further.

A browser that does not take what it is sent within `PATIENCE` is cut off, and may come again: it has then missed
nothing, for it is sent the whole view anew. Nobody waits for it, and nothing is kept for it.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from elastic3d.dashboard.feed import ViewFeed
from elastic3d.trust.listening import Waiting

PATIENCE = 5.0
"""Seconds that a browser has to take an event."""

ALIVE = 5.0
"""Seconds without a change after which an event says that nothing has changed."""

RETRY = b"retry: 2000\n\n"

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Connections:
    """The open connections, by the browser's address: what it takes to end one that is not read any more.

    Only `WAITING` each may be without their first and without another whole request: uvicorn would wait for any number
    of them, for any time. Those that were heard push out none that has just come.
    """

    def __init__(self) -> None:
        self._transports: dict[tuple[str, int], asyncio.BaseTransport] = {}
        self._new: Waiting[H11Protocol] = Waiting()
        self._heard: Waiting[H11Protocol] = Waiting()

    def protocol(self) -> type[H11Protocol]:
        """Return the protocol for uvicorn whose connections are kept here."""
        transports, new, heard = self._transports, self._new, self._heard

        class Kept(H11Protocol):
            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
                super().connection_made(transport)
                if self.client is not None:
                    transports[self.client] = transport
                self._look()

            def data_received(self, data: bytes) -> None:
                super().data_received(data)
                self._look()

            def on_response_complete(self) -> None:
                super().on_response_complete()
                self._look()

            def _look(self) -> None:
                """Take note whether the caller still has to send something; if too many have, another one goes."""
                lacking = self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing()
                waiting, other = (new, heard) if self.cycle is None else (heard, new)
                other.remove(self)
                if not lacking:
                    waiting.remove(self)
                elif (crowded := waiting.add(self, self.client[0] if self.client is not None else "")) is not None:
                    crowded.transport.abort()

            def connection_lost(self, exc: Exception | None) -> None:
                new.remove(self)
                heard.remove(self)
                if self.client is not None:
                    transports.pop(self.client, None)
                super().connection_lost(exc)

        return Kept

    def abort(self, client: object) -> None:
        """End a connection, and forget what was not sent, in the kernel too."""
        transport = self._transports.get(client) if isinstance(client, tuple) else None
        if isinstance(transport, asyncio.WriteTransport):
            connection = transport.get_extra_info("socket")
            if connection is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()


async def stream(
    feed: ViewFeed,
    scope: Scope,
    receive: Receive,
    send: Send,
    *,
    connections: Connections,
    headers: list[tuple[bytes, bytes]],
    compressed: bool,
    patience: float = PATIENCE,
    alive: float = ALIVE,
) -> bool:
    """Send a browser the view and what changes, until it goes or the feed is closed; return False if it was cut off."""
    pack = zlib.compressobj(6, zlib.DEFLATED, 31) if compressed else None
    gone = asyncio.ensure_future(_gone(receive))

    async def give(message: Message) -> None:
        async with asyncio.timeout(patience):
            await send(message)

    async def write(body: bytes) -> None:
        if pack is not None:
            body = pack.compress(body) + pack.flush(zlib.Z_SYNC_FLUSH)
        await give({"type": "http.response.body", "body": body, "more_body": True})
        # What is sent is only written; the next one waits for room. So wait for that here, within the same patience.
        await give({"type": "http.response.body", "body": b"", "more_body": True})

    try:
        kind = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]
        packed = [(b"content-encoding", b"gzip"), (b"vary", b"accept-encoding")] if compressed else []
        await give({"type": "http.response.start", "status": 200, "headers": [*headers, *kind, *packed]})
        await write(RETRY)
        version = 0
        while not feed.closed and not gone.done():
            changed = feed.next_change()
            pulled = feed.since(version)
            if pulled is not None:
                version = pulled.version
                await write(pulled.message)
                continue
            waiting = asyncio.ensure_future(changed.wait())
            await asyncio.wait({waiting, gone}, timeout=alive, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                waiting.cancel()
                if not gone.done():
                    await write(feed.alive())
        if not gone.done():
            await give({"type": "http.response.body", "body": b"", "more_body": False})
        return True
    except TimeoutError:
        connections.abort(scope.get("client"))
        await asyncio.wait({gone}, timeout=1.0)
        return False
    finally:
        gone.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
