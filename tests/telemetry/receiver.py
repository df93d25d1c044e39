"""A collector of OpenTelemetry for tests: a real HTTP server that decodes what exporters send, or answers wrongly."""

from __future__ import annotations

import gzip
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as traces
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span

TRACES, METRICS = "/v1/traces", "/v1/metrics"

Answer = Callable[[BaseHTTPRequestHandler], None]


class Receiver:
    """Listens on the loopback address until it is left. answer: what a caller gets instead, None to take its data.

    latest, by_node: the newest metrics by name, of all nodes and of each. sender: the node of each span, by its id.
    """

    def __init__(self, *, port: int = 0) -> None:
        self.answer: Answer | None = None
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.latest: dict[str, Metric] = {}
        self.by_node: dict[str, dict[str, Metric]] = defaultdict(dict)
        self.sender: dict[bytes, str] = {}
        self.headers: list[dict[str, str]] = []
        self.requests = 0
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.take(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Listen no more."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def take(self, call: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        body = call.rfile.read(int(call.headers["Content-Length"]))
        self.requests += 1
        if self.answer is not None:
            self.answer(call)
            return
        assert call.headers["Content-Type"] == "application/x-protobuf"
        body = gzip.decompress(body) if call.headers.get("Content-Encoding") == "gzip" else body
        self.headers.append({name.lower(): value for name, value in call.headers.items()})
        if call.path == TRACES:
            sent = traces.ExportTraceServiceRequest.FromString(body)
            for group in sent.resource_spans:
                self.resources.append(plain(group.resource.attributes))
                spans = [span for scope in group.scope_spans for span in scope.spans]
                self.sender |= {span.span_id: self.resources[-1]["elastic3d.node"] for span in spans}
                self.spans += spans
            reply(call, 200, traces.ExportTraceServiceResponse().SerializeToString())
        elif call.path == METRICS:
            given = metrics.ExportMetricsServiceRequest.FromString(body)
            for part in given.resource_metrics:
                self.resources.append(plain(part.resource.attributes))
                read = {one.name: one for scope in part.scope_metrics for one in scope.metrics}
                self.latest |= read
                self.by_node[self.resources[-1]["elastic3d.node"]] |= read
            reply(call, 200, metrics.ExportMetricsServiceResponse().SerializeToString())
        else:
            reply(call, 404, b"no such path")

    def until(self, holds: Callable[[], bool], patience: float = 20.0) -> None:
        """Wait until something holds."""
        end = time.monotonic() + patience
        while not holds():
            assert time.monotonic() < end, (self.requests, [span.name for span in self.spans], sorted(self.latest))
            time.sleep(0.01)


def plain(attributes: Any) -> dict[str, Any]:
    """Return attributes as values of Python."""
    return {one.key: _value(one.value) for one in attributes if isinstance(one, KeyValue)}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind) if kind is not None else None


def reply(call: BaseHTTPRequestHandler, status: int, body: bytes, **headers: str) -> None:
    """Send an answer."""
    call.send_response(status)
    call.send_header("Content-Length", str(len(body)))
    for name, value in headers.items():
        call.send_header(name.replace("_", "-"), value)
    call.end_headers()
    call.wfile.write(body)
