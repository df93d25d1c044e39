"""A real S3 server process for tests: moto's."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any


def free_port() -> int:
    """Return a port of the loopback that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait_for(port: int, seconds: float = 30.0) -> None:
    """Return when somebody listens on the port."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError(f"nobody listens on port {port} after {seconds} s")


@contextlib.contextmanager
def moto() -> Iterator[dict[str, Any]]:
    """Run a server with a bucket named `bucket`; yields the options a store is opened with."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        wait_for(port)
        given = {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{port}"}
        import s3fs

        s3fs.S3FileSystem(**given).mkdir("bucket")
        yield given
    finally:
        server.kill()
        server.wait()
