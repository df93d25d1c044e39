"""Metadata servers that answer like those of AWS, Google Cloud and Azure, each for one machine, over HTTP.

They refuse what the vendors document, with the documented status: what is noticed here with a wrong header, a missing
token or a wrong query would prove nothing.
"""

from __future__ import annotations

import json
import secrets
import socketserver
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.message import Message
from email.utils import formatdate
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from chaos.machine.processes import free_port
from chaos.servers.s3 import LOOPBACK
from elastic3d.clock import SYSTEM, Clock


@dataclass
class Request:
    """A client's request."""

    method: str
    path: str
    query: dict[str, str]
    headers: Message
    body: bytes


@dataclass
class Reply:
    """A server's reply."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    cloud: Cloud

    def handle_error(self, request: Any, client_address: Any) -> None:
        # Some tests are about clients that hang up during a request.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def answer(self) -> None:
        parts = urlsplit(self.path)
        request = Request(
            method=self.command,
            path=parts.path,
            query={name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()},
            headers=self.headers,
            body=self.rfile.read(int(self.headers.get("Content-Length", 0))),
        )
        reply = self.server.cloud.serve(request)
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        self.wfile.write(reply.body)

    do_GET = do_PUT = do_POST = answer  # noqa: N815 - the names http.server calls

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(self.server.cloud.clock.wall() if timestamp is None else timestamp)

    def log_message(self, *args: Any) -> None:
        pass


class Cloud(ABC):
    """A metadata server that can be turned on and off. `faults`: replies for the next requests, in place of its own.

    host: the address of this machine at which it listens. clock: the cloud's own.
    """

    def __init__(self, host: str = LOOPBACK) -> None:
        self._host = host
        self.changed = threading.Condition()
        self.clock: Clock = SYSTEM
        self.requests: list[Request] = []
        self.refused: list[int] = []
        self.faults: list[Reply] = []
        self._port = free_port()
        self._server: _Server | None = None
        self.start()

    @property
    def url(self) -> str:
        """The value for `--rdzv-conf=notices_url`."""
        return f"http://{self._host}:{self._port}"

    def start(self) -> None:
        """Listen, on the same port each time."""
        self._server = _Server((self._host, self._port), _Handler)
        self._server.cloud = self
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Refuse connections."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            socketserver.TCPServer.server_close(server)
        with self.changed:
            self.changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.stop()

    def serve(self, request: Request) -> Reply:
        """Return the reply to a request, and keep the request."""
        with self.changed:
            self.requests.append(request)
            fault = self.faults.pop(0) if self.faults else None
            self.changed.notify_all()
        reply = fault if fault is not None else self.reply(request)
        if reply.status >= 400:
            self.refused.append(reply.status)
        return reply

    @abstractmethod
    def reply(self, request: Request) -> Reply:
        """Return the reply to a request."""

    @abstractmethod
    def preempt(self) -> None:
        """Announce from now on that the machine is taken, as this cloud does: 30 or 120 seconds before."""

    def asked(self, path: str, times: int = 1) -> bool:
        """Wait until `path` was requested so often; return whether it was."""
        with self.changed:
            return self.changed.wait_for(lambda: sum(r.path == path for r in self.requests) >= times, 5)

    @contextmanager
    def change(self) -> Iterator[None]:
        """Change what is served, and let hanging requests see it."""
        with self.changed:
            yield
            self.changed.notify_all()


class Aws(Cloud):
    """EC2's, with IMDSv2 required. `items`: values by path; any other path is 404."""

    TOKEN = "/latest/api/token"

    def __init__(self, host: str = LOOPBACK) -> None:
        self.tokens: dict[str, float] = {}
        self.items: dict[str, str] = {}
        super().__init__(host)

    def preempt(self) -> None:
        """Announce it, 120 s before."""
        at = datetime.fromtimestamp(self.clock.wall() + 120, tz=UTC)
        self.interrupt("terminate", at.strftime("%Y-%m-%dT%H:%M:%SZ"))

    def interrupt(self, action: str, time: str) -> None:
        """Announce an action at a time, as 2017-09-18T08:22:00Z."""
        self.items["/latest/meta-data/spot/instance-action"] = json.dumps({"action": action, "time": time})

    def recommend(self, time: str) -> None:
        """Recommend to rebalance: the machine is more likely to be taken than others."""
        self.items["/latest/meta-data/events/recommendations/rebalance"] = json.dumps({"noticeTime": time})

    def reply(self, request: Request) -> Reply:
        """Return the reply to a request."""
        if request.path == self.TOKEN:
            if request.method != "PUT":
                return Reply(405)
            if "X-Forwarded-For" in request.headers:
                return Reply(403)
            lifetime = request.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            if not lifetime.isdigit() or not 1 <= int(lifetime) <= 21600:
                return Reply(400)
            token = secrets.token_urlsafe(40) + "=="
            self.tokens[token] = SYSTEM.monotonic() + int(lifetime)
            return Reply(200, token.encode(), {"X-aws-ec2-metadata-token-ttl-seconds": lifetime})
        if self.tokens.get(request.headers.get("X-aws-ec2-metadata-token", ""), 0.0) <= SYSTEM.monotonic():
            return Reply(401, b"<h1>401 - Unauthorized</h1>")
        if request.path not in self.items:
            return Reply(404, b"<h1>404 - Not Found</h1>")
        return Reply(200, self.items[request.path].encode(), {"Content-Type": "text/plain"})


class Gcp(Cloud):
    """Compute Engine's. `set` changes a value and its ETag."""

    PREEMPTED = "/computeMetadata/v1/instance/preempted"
    MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"

    def __init__(self, host: str = LOOPBACK) -> None:
        self.values = {self.PREEMPTED: "FALSE", self.MAINTENANCE: "NONE"}
        self.etags = dict.fromkeys(self.values, "0a1b2c3d4e5f6071")
        self.hanging = 0
        self.etagged = True
        super().__init__(host)

    def preempt(self) -> None:
        """Announce it, 30 s before."""
        self.set(self.PREEMPTED, "TRUE")

    def set(self, path: str, value: str) -> None:
        """Change a value."""
        with self.change():
            self.values[path] = value
            self.etags[path] = secrets.token_hex(8)

    def reply(self, request: Request) -> Reply:
        """Return the reply to a request."""
        if request.headers.get("Metadata-Flavor") != "Google" or "X-Forwarded-For" in request.headers:
            return Reply(403, b"Missing Metadata-Flavor:Google header.")
        if request.path not in self.values:
            return Reply(404)
        with self.changed:
            if request.query.get("wait_for_change") == "true":
                self._hang(request)
            headers = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}
            if self.etagged:
                headers["ETag"] = self.etags[request.path]
            return Reply(200, self.values[request.path].encode(), headers)

    def _hang(self, request: Request) -> None:
        known = request.query.get("last_etag", self.etags[request.path])
        seconds = request.query.get("timeout_sec")
        server = self._server
        self.hanging += 1
        self.changed.notify_all()
        self.changed.wait_for(
            lambda: self.etags[request.path] != known or self._server is not server,
            None if seconds is None else float(seconds),
        )
        self.hanging -= 1


class Azure(Cloud):
    """Azure's, for the VM "worker_3". `slow`: seconds the first request for events takes."""

    EVENTS = "/metadata/scheduledevents"
    NAME = "/metadata/instance/compute/name"

    def __init__(self, host: str = LOOPBACK) -> None:
        self.name = "worker_3"
        self.events: list[dict[str, Any]] = []
        self.incarnation = 1
        self.slow = 0.0
        super().__init__(host)

    def preempt(self) -> None:
        """Announce it, 30 s before."""
        self.schedule(secrets.token_hex(8), "Preempt", formatdate(self.clock.wall() + 30, usegmt=True))

    def schedule(self, identity: str, kind: str, not_before: str, resources: tuple[str, ...] = ("worker_3",)) -> None:
        """Announce an event of these machines."""
        with self.change():
            self.incarnation += 1
            self.events.append(
                {
                    "EventId": identity,
                    "EventStatus": "Scheduled",
                    "EventType": kind,
                    "ResourceType": "VirtualMachine",
                    "Resources": list(resources),
                    "NotBefore": not_before,
                    "Description": "",
                    "EventSource": "Platform",
                    "DurationInSeconds": -1,
                }
            )

    def begin(self, identity: str) -> None:
        """Start an event: its time is blank from then on."""
        with self.change():
            self.incarnation += 1
            for event in self.events:
                if event["EventId"] == identity:
                    event |= {"EventStatus": "Started", "NotBefore": ""}

    def end(self, identity: str) -> None:
        """End or cancel an event: it disappears either way."""
        with self.change():
            self.incarnation += 1
            self.events = [event for event in self.events if event["EventId"] != identity]

    def reply(self, request: Request) -> Reply:
        """Return the reply to a request."""
        if request.headers.get("Metadata", "").lower() != "true" or "X-Forwarded-For" in request.headers:
            return Reply(400, b'{"error": "Bad request. Required metadata header not specified"}')
        if request.path.startswith("/metadata/instance/"):
            return self._instance(request)
        if request.path != self.EVENTS:
            return Reply(404)
        if request.query.get("api-version") != "2020-07-01":
            return Reply(400, b'{"error": "Bad request. api-version was not specified in the request"}')
        if request.method == "POST":
            return self._approve(request.body)
        slow, self.slow = self.slow, 0.0
        SYSTEM.sleep(slow)
        return Reply(200, json.dumps({"DocumentIncarnation": self.incarnation, "Events": self.events}).encode())

    def _instance(self, request: Request) -> Reply:
        leaf = {self.NAME: self.name, "/metadata/instance/compute/azEnvironment": "AzurePublicCloud"}.get(request.path)
        if "api-version" not in request.query or request.query.get("format") != "text":
            # A leaf is available as text only.
            return Reply(400)
        return Reply(404) if leaf is None else Reply(200, leaf.encode())

    def _approve(self, body: bytes) -> Reply:
        try:
            wanted = [start["EventId"] for start in json.loads(body)["StartRequests"]]
        except (ValueError, KeyError, TypeError):
            return Reply(400)
        if not {event["EventId"] for event in self.events} >= set(wanted):
            return Reply(400)
        for identity in wanted:
            self.begin(identity)
        return Reply(200)


class Provider(StrEnum):
    """Whose server it is, as `--rdzv-conf=notices=` has it."""

    GCP = "gcp"
    AWS = "aws"
    AZURE = "azure"


def cloud_of(provider: Provider, host: str = LOOPBACK) -> Cloud:
    """Return a server of this cloud, which serves at an address of this machine."""
    kinds: dict[Provider, type[Cloud]] = {Provider.GCP: Gcp, Provider.AWS: Aws, Provider.AZURE: Azure}
    return kinds[provider](host)
