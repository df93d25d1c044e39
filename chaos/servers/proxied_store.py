"""An object store with a proxy before it, and an environment in which every S3 client of this machine finds it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from chaos.servers import s3
from chaos.servers.s3_proxy import Harm, S3Proxy, s3_proxy


@contextmanager
def proxied_store(harms: Sequence[Harm] = (), *, host: str = s3.LOOPBACK) -> Iterator[tuple[str, S3Proxy]]:
    """Run an S3 server until the block ends, and yield a URL in it and the proxy; the environment says where it is.

    host: the address of this machine at which the proxy listens.
    """
    with s3.s3_server() as server, s3_proxy(server.port, harms, host=host) as proxy:
        options = s3.options(proxy.port, host)
        own = {
            "AWS_ENDPOINT_URL": options["endpoint_url"],
            "AWS_ACCESS_KEY_ID": options["key"],
            "AWS_SECRET_ACCESS_KEY": options["secret"],
            "AWS_DEFAULT_REGION": "us-east-1",
            # The network between nodes is within this machine, like the loopback one.
            "AWS_ALLOW_HTTP": "true",
        }
        with _environment(own):
            yield server.url("chaos"), proxy


@contextmanager
def _environment(own: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
