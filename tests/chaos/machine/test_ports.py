"""Ports for servers that are started later."""

from __future__ import annotations

from pathlib import Path

from chaos.machine.processes import free_port


def test_a_free_port_is_none_that_the_system_gives_away() -> None:
    """Whoever connects, or listens at any port, meanwhile does not get it: a server may take seconds to start."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not [port for port in (free_port() for _ in range(20)) if first <= port <= last]
