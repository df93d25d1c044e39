"""A nursery and an S3 server shared by several tests: each takes a second to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chaos.failpoints.nursery import Nursery, nursery
from chaos.servers.s3 import S3Server, s3_server


@pytest.fixture(scope="module")
def crew() -> Iterator[Nursery]:
    with nursery() as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running
