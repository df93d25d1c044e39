"""A metadata server that answers like Google Compute Engine's, for one machine, and preempts it on request."""

from __future__ import annotations

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, urlsplit

PREEMPTED = "/computeMetadata/v1/instance/preempted"
MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"


class MetadataServer:
    """Serves on a port of the loopback address until it is closed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._preempted = self._closed = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The value for `--rdzv-conf=notices_url`."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def preempt(self) -> None:
        """Announce from now on that the machine is taken in 30 seconds."""
        with self._changed:
            self._preempted = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop serving, and end the requests that hang."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _value(self, path: str, last_etag: str, patience: float) -> str:
        """Return the value of the entry once it differs from that of `last_etag`; "" for no such entry."""

        def now() -> str:
            return {PREEMPTED: str(self._preempted).upper(), MAINTENANCE: "NONE"}.get(path, "")

        with self._changed:
            self._changed.wait_for(lambda: self._closed or now() != last_etag, patience)
            return now()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        answer = self._value

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                asked = {name: values[-1] for name, values in parse_qs(parts.query).items()}
                hangs = asked.get("wait_for_change") == "true"
                value = answer(
                    parts.path, asked.get("last_etag", ""), float(asked.get("timeout_sec", 60)) if hangs else 0.0
                )
                google = self.headers.get("Metadata-Flavor") == "Google"
                self.send_response(200 if value and google else 403 if not google else 404)
                self.send_header("Metadata-Flavor", "Google")
                self.send_header("ETag", value)
                self.send_header("Content-Length", str(len(value)))
                # Who asked may be gone since.
                with contextlib.suppress(ConnectionError):
                    self.end_headers()
                    self.wfile.write(value.encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler
