"""What `metrics=` may be, and what is said of anything else."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from elastic3d.errors import ConfigurationError, UsageError
from elastic3d.metrics import exposition
from elastic3d.metrics.address import MetricsAddress, metrics_address


@pytest.mark.parametrize(
    ("given", "host", "port"),
    [
        (":9464", "127.0.0.1", 9464),
        (":0", "127.0.0.1", 0),
        ("10.0.0.7:9464", "10.0.0.7", 9464),
        ("0.0.0.0:1", "0.0.0.0", 1),
        ("[::1]:65535", "::1", 65535),
        ("my-host.example:9464", "my-host.example", 9464),
    ],
)
def test_an_address_is_a_host_and_a_port(given: str, host: str, port: int) -> None:
    """Without a host it is this machine alone."""
    address = metrics_address(given)
    assert address == MetricsAddress(host=host, port=port)
    assert address.at("10.0.0.9") == (host, port)
    assert metrics_address(str(address)) == address


def test_the_nodes_own_address_is_a_word() -> None:
    """The same script runs on all nodes."""
    address = metrics_address("node:9464")
    assert address is not None
    assert address.at("10.0.0.9") == ("10.0.0.9", 9464)
    assert metrics_address(None) is None


@pytest.mark.parametrize(
    "value",
    ["", "9464", 9464, True, False, b":9464", "host", "host:", ":65536", ":-1", "::1:9464", "http://h:1", ":9464/x",
     "[::1]", ":9464\n", ": 9464", "a b:1", ":999999", ":٣"],
)  # fmt: skip
def test_anything_else_is_refused(value: Any) -> None:
    """With the forms that there are."""
    with pytest.raises(UsageError, match=r"metrics=.*':9464'.*'node:9464'.*port 0"):
        metrics_address(value)


def test_without_the_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is started."""
    exposition.require_client()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'elastic3d\[metrics\]'"):
        exposition.require_client()
