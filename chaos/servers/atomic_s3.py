"""moto's S3 server, with conditional writes that are decided one after another: `-m chaos.servers.atomic_s3 HOST PORT`.

moto looks at a condition and then writes, without a lock between: of two writers with the same ETag both may be told
that they won, and what one wrote is lost. S3 promises one winner, and commits are built on that.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

_CONDITIONS = ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH")


class Atomic:
    """A WSGI application that passes conditional writes on one at a time, once their bodies are there."""

    def __init__(self, application: WSGIApplication) -> None:
        self._application = application
        self._deciding = threading.Lock()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer a request."""
        if environ["REQUEST_METHOD"] not in ("PUT", "POST") or not any(name in environ for name in _CONDITIONS):
            return self._application(environ, start_response)
        if length := environ.get("CONTENT_LENGTH"):
            # Whoever sends slowly, or stops, holds up nobody else.
            environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(int(length)))
        with self._deciding:
            return self._application(environ, start_response)


def main(host: str, port: int) -> None:
    """Serve until the process is ended."""
    application = Atomic(DomainDispatcherApplication(create_backend_app))
    run_simple(host, port, application, threaded=True, request_handler=MotoRequestHandler)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
