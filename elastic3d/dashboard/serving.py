"""The web application: the page, its stream of changes, and orders where they are allowed."""

from __future__ import annotations

import gzip
import json
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from checkpointing.errors import CheckpointError, NoCheckpoint
from checkpointing.inspection.difference import Difference
from elastic3d.cli.durations import spell
from elastic3d.clock import SYSTEM, Clock
from elastic3d.dashboard.access import PageAccess, same_origin
from elastic3d.dashboard.feed import ViewFeed
from elastic3d.dashboard.page import page, plain_page, policy
from elastic3d.dashboard.store_reading import StoreBusy
from elastic3d.dashboard.store_view import comparison_page
from elastic3d.dashboard.streaming import Connections, Message, Receive, Scope, Send, stream
from elastic3d.errors import Elastic3dError, UsageError
from elastic3d.pages.markup import Html
from elastic3d.trust.listening import WAITING

MOST_STREAMS = 64
"""Browsers that may follow the page at the same time."""

MOST_CONNECTIONS = MOST_STREAMS + 2 * WAITING + 64
"""Connections from which on requests are refused. Of those that ask for nothing, there are never as many."""

MOST_ORDER = 8192
"""Bytes of an order."""

MOST_NAME = 512
"""Characters of a checkpoint's name."""

ENDING = 1
"""Seconds that connections have to end when the server does."""

HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
"""Headers of every answer; the page's own policy allows what stands in it."""

_NO_TOKEN = (
    Html("This page shows a job only to those who have its token."),
    Html("Open the address that <code>elastic3d dashboard</code> printed; it ends in <code>?token=...</code>."),
    Html('If you have just done so by a link on another page: <a href="/">go on</a>.'),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSettings:
    """port: by which cookies of several dashboards on one host are told apart. patience, alive: as in `streaming`.

    compare: returns what changed between two checkpoints, None where no store is read.
    """

    access: PageAccess
    port: int
    give: Callable[[dict[str, Any]], str] | None
    hurry: Callable[[], None]
    compare: Callable[[str, str], Difference] | None = None
    most_streams: int = MOST_STREAMS
    patience: float = 5.0
    alive: float = 5.0
    clock: Clock = SYSTEM

    @property
    def cookie(self) -> str:
        """The name of the cookie that holds the token."""
        return f"elastic3d-dashboard-{self.port}"


class PageServer(uvicorn.Server):
    """Serves a feed until Ctrl-C or SIGTERM; its streams end at once then."""

    def __init__(self, feed: ViewFeed, settings: PageSettings) -> None:
        self._feed = feed
        connections = Connections()
        super().__init__(
            uvicorn.Config(
                application(feed, settings, connections),
                http=connections.protocol(),
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=MOST_CONNECTIONS,
                timeout_graceful_shutdown=ENDING,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve."""
        self._feed.attach()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End the streams, and then the rest."""
        self._feed.close()
        super().handle_exit(sig, frame)


def application(
    feed: ViewFeed, settings: PageSettings, connections: Connections
) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """Return the ASGI application."""
    served = _Page(feed, settings, connections)
    routes = [
        Route("/", served.page, methods=["GET"]),
        Route("/stream", served.stream, methods=["GET"]),
        Route("/orders", served.order, methods=["POST"]),
        Route("/difference", served.difference, methods=["GET"]),
    ]
    return _Guard(Starlette(routes=routes), settings)


class _Guard:
    """Lets requests pass that may, and gives every answer its headers."""

    def __init__(self, app: Starlette, settings: PageSettings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=list(message.get("headers", [])))
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                message = {**message, "headers": headers.raw}
            await send(message)

        if scope["type"] != "http":
            return
        refusal = self._refusal(Request(scope))
        await (refusal or self._app)(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        access = self._settings.access
        hosts = request.headers.getlist("host")
        if len(hosts) != 1 or not access.host_allowed(hosts[0]):
            return PlainTextResponse(
                "The name in this address is not this page's; elastic3d dashboard --allow-host NAME allows it.\n",
                HTTPStatus.MISDIRECTED_REQUEST,
            )
        given = request.query_params.get("token")
        if given is not None and access.token and request.url.path == "/":
            if not access.token_right(given):
                return _refused("This is not the token", HTTPStatus.FORBIDDEN)
            response = RedirectResponse("/", HTTPStatus.SEE_OTHER)
            response.set_cookie(self._settings.cookie, given, path="/", httponly=True, samesite="strict")
            return response
        cookie = request.cookies.get(self._settings.cookie, "")
        if not access.may_see(cookie=cookie, authorization=request.headers.get("authorization", "")):
            return _refused("No token", HTTPStatus.UNAUTHORIZED)
        return None


def _refused(title: str, status: HTTPStatus) -> Response:
    return Response(plain_page(title, *_NO_TOKEN), status, media_type="text/html")


class _Page:
    def __init__(self, feed: ViewFeed, settings: PageSettings, connections: Connections) -> None:
        self._feed, self._settings, self._connections = feed, settings, connections
        self.stream = _Stream(feed, settings, connections)

    async def page(self, request: Request) -> Response:
        """Return the whole page, as the job stands."""
        _, view, read_at = self._feed.view()
        nonce, now = secrets.token_urlsafe(16), self._settings.clock.wall()
        body = page(
            view,
            nonce=nonce,
            read_at=read_at,
            now=now,
            when=f"{spell(max(0.0, now - read_at))} ago",
            orders=self._settings.give is not None,
        ).encode()
        headers = {"content-security-policy": policy(nonce), "vary": "accept-encoding"}
        if _takes_gzip(request.headers):
            body = gzip.compress(body, 5)
            headers["content-encoding"] = "gzip"
        return Response(body, headers=headers, media_type="text/html")

    async def difference(self, request: Request) -> Response:
        """Return a page about what changed between two checkpoints of the store."""
        compare = self._settings.compare
        if compare is None:
            return PlainTextResponse("elastic3d dashboard --store URL compares checkpoints.\n", HTTPStatus.NOT_FOUND)
        before, after = request.query_params.get("before", ""), request.query_params.get("after", "")
        if not (0 < len(before) <= MOST_NAME and 0 < len(after) <= MOST_NAME):
            return PlainTextResponse("Name two checkpoints: before and after.\n", HTTPStatus.BAD_REQUEST)
        try:
            changes = await run_in_threadpool(compare, before, after)
        except StoreBusy as error:
            return PlainTextResponse(f"{error}\n", HTTPStatus.SERVICE_UNAVAILABLE, {"retry-after": "10"})
        except NoCheckpoint as error:
            return PlainTextResponse(f"{' '.join(str(error).split())}\n", HTTPStatus.NOT_FOUND)
        except (CheckpointError, OSError, ValueError) as error:
            return PlainTextResponse(f"{' '.join(str(error).split())}\n", HTTPStatus.BAD_GATEWAY)
        nonce = secrets.token_urlsafe(16)
        body = await run_in_threadpool(comparison_page, changes, nonce)
        return Response(body, headers={"content-security-policy": policy(nonce)}, media_type="text/html")

    async def order(self, request: Request) -> Response:
        """Carry out an order, where orders are allowed."""
        give = self._settings.give
        if give is None:
            return PlainTextResponse(
                "This page only shows the job; elastic3d dashboard --allow-orders lets it give orders.\n",
                HTTPStatus.FORBIDDEN,
            )
        origins, site = request.headers.getlist("origin"), request.headers.get("sec-fetch-site", "same-origin")
        host = request.headers["host"]
        if len(origins) != 1 or not same_origin(origins[0], host) or site != "same-origin":
            return PlainTextResponse("An order has to come from the page itself.\n", HTTPStatus.FORBIDDEN)
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return PlainTextResponse("An order is JSON.\n", HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MOST_ORDER:
                return PlainTextResponse("This order is too long.\n", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        try:
            wish = json.loads(body)
            if not isinstance(wish, dict):
                raise UsageError("an order is a JSON object")
            done = await run_in_threadpool(give, wish)
        except (ValueError, RecursionError) as error:  # a UsageError is a ValueError
            return PlainTextResponse(f"{' '.join(str(error).split())}\n", HTTPStatus.BAD_REQUEST)
        except Elastic3dError as error:
            return PlainTextResponse(f"{' '.join(str(error).split())}\n", HTTPStatus.SERVICE_UNAVAILABLE)
        self._settings.hurry()
        return PlainTextResponse(f"{done}\n")


class _Stream:
    """The endpoint of the stream, a plain ASGI application: it says itself what it sends, and when it gives up."""

    def __init__(self, feed: ViewFeed, settings: PageSettings, connections: Connections) -> None:
        self._feed, self._settings, self._connections = feed, settings, connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        feed = self._feed
        if feed.watching >= self._settings.most_streams:
            busy = PlainTextResponse(
                f"{feed.watching} browsers follow this page already, and no more may.\n",
                HTTPStatus.SERVICE_UNAVAILABLE,
                {"retry-after": "10"},
            )
            await busy(scope, receive, send)
            return
        feed.watching += 1
        try:
            self._settings.hurry()
            await stream(
                feed,
                scope,
                receive,
                send,
                connections=self._connections,
                headers=[],
                compressed=_takes_gzip(Headers(scope=scope)),
                patience=self._settings.patience,
                alive=self._settings.alive,
            )
        finally:
            feed.watching -= 1


def _takes_gzip(headers: Headers) -> bool:
    names = [word.strip() for word in headers.get("accept-encoding", "").lower().split(",")]
    return any(name.partition(";")[0] == "gzip" and not name.endswith("q=0") for name in names)
