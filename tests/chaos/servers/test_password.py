"""Changes of etcd's password that meet each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from chaos.faults.etcd import EtcdPassword
from chaos.faults.live import LiveJob
from chaos.faults.moment import When
from chaos.servers.etcd import EtcdServer

pytestmark = pytest.mark.etcd


def test_whichever_change_ends_last_the_nodes_have_the_password_that_counts(tmp_path: Path) -> None:
    """The earlier one of two ended after the later one, with a password that counted no more: nobody got in again."""
    later: list[tuple[float, Callable[[], object]]] = []
    file = tmp_path / "password"
    with EtcdServer(password="first") as etcd:
        job = SimpleNamespace(
            own_etcd=etcd,
            password_file=file,
            note=lambda text: None,
            later=lambda seconds, do: later.append((seconds, do)),
        )
        for seconds in (2.0, 0.5):
            assert EtcdPassword(when=When(step=1), seconds=seconds).make(cast(LiveJob, job))
        for _, do in sorted(later, key=lambda one: one[0]):
            do()
        assert file.read_text() == etcd.password
