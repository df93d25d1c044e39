"""Check that this node can reach others, and etcd."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from elastic3d.admission.check import Check, CheckResult, Unfit, run_checks
from elastic3d.values import Generation, Node

SECONDS = 1.0
"""Seconds for one connection."""

LIMIT = 5.0
"""Seconds for one check: a name may not resolve, and a machine may be too busy to connect in time."""

NEIGHBOURS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachTarget:
    """A port to connect to."""

    name: str
    address: str
    port: int


def neighbours(generation: Generation, me: str) -> tuple[Node, ...]:
    """Return up to three nodes of a generation to try: different ones for each node `me`, the same in each call."""
    others = [node for node in generation.nodes if node.name != me and node.heartbeat_port]
    first = zlib.crc32(me.encode()) % len(others) if others else 0
    return tuple((others + others)[first : first + min(NEIGHBOURS, len(others))])


def reach(name: str, targets: Sequence[ReachTarget], *, need: int) -> CheckResult:
    """Connect to all targets at once; ok if `need` of them answer. Those that do not are named either way."""
    results = run_checks([Check(name=one.name, run=partial(_connect, one), limit=LIMIT) for one in targets])
    missed = [f"{check.name}: {check.detail}" for check in results if not check.ok]
    ok = len(results) - len(missed) >= need
    detail = "; ".join(missed)
    if not ok:
        detail += ": look at this node's network, routes and firewall"
    return CheckResult(name=name, ok=ok, detail=detail, seconds=max((check.seconds for check in results), default=0.0))


def _connect(target: ReachTarget) -> str:
    try:
        socket.create_connection((target.address, target.port), timeout=SECONDS).close()
    except TimeoutError as error:
        raise Unfit(f"{target.address}:{target.port} does not answer within {SECONDS:g} s") from error
    except OSError as error:
        raise Unfit(f"{target.address}:{target.port}: {error.strerror or error}") from error
    return ""
