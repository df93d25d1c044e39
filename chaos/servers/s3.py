"""A real S3 server process: moto's, with one bucket."""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from chaos.machine.processes import free_port, leashed, wait_until

BUCKET = "bucket"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Server:
    """A server on an address of this machine that has one bucket."""

    port: int
    host: str = LOOPBACK

    @property
    def options(self) -> dict[str, Any]:
        """What `open_store` needs to reach it."""
        return options(self.port, self.host)

    def url(self, prefix: str) -> str:
        """Return the URL of a place of its own in the bucket."""
        return f"s3://{BUCKET}/{prefix}"


def options(port: int, host: str = LOOPBACK) -> dict[str, Any]:
    """Return the options for a server, or a proxy, at a port of an address of this machine."""
    return {"key": "key", "secret": "secret", "endpoint_url": f"http://{host}:{port}"}


@contextlib.contextmanager
def s3_server(seconds: float = 60.0, *, host: str = LOOPBACK) -> Iterator[S3Server]:
    """Run a server until the block ends. TimeoutError when it takes no requests within `seconds`."""
    port = free_port()
    server = subprocess.Popen(
        leashed([sys.executable, "-m", "chaos.servers.atomic_s3", host, str(port)]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "MOTO_PORT": str(port), "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        if not wait_until(lambda: _make_bucket(host, port), seconds):
            raise TimeoutError(f"the S3 server took no requests within {seconds} s")
        yield S3Server(port=port, host=host)
    finally:
        server.kill()
        server.wait()


def _make_bucket(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=30)
    try:
        connection.request("PUT", f"/{BUCKET}")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
