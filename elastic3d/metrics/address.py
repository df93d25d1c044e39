"""Where a node's metrics are served: `metrics=` of `elastic3d.run`, checked where it enters."""

from __future__ import annotations

import re
from dataclasses import dataclass

from elastic3d.errors import UsageError

LOOPBACK = "127.0.0.1"
NODE = "node"
"""The word for a node's own address, the one where the others reach it: a script is the same on all nodes."""

_FORM = re.compile(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:\[\]/]*)):([0-9]{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsAddress:
    """host: an address or a name, or `NODE`. port: 0 to ask the system for one."""

    host: str
    port: int

    def at(self, own: str) -> tuple[str, int]:
        """Return where to listen on the node whose own address is `own`."""
        return own if self.host == NODE else self.host, self.port

    def __str__(self) -> str:
        return shown(self.host, self.port)


def shown(host: str, port: int) -> str:
    """Return an address as people write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def metrics_address(value: object) -> MetricsAddress | None:
    """Return where metrics are to be served, None for nowhere; UsageError for what is no address."""
    if value is None:
        return None
    match = _FORM.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match[3]) > 65535:
        raise UsageError(
            f"elastic3d.run(metrics={value!r}): give ':9464' for this machine alone, 'node:9464' for the node's own "
            "address, an address such as '10.0.0.7:9464' or '[::1]:9464', or None; port 0 asks the system for one"
        )
    return MetricsAddress(host=match[1] or match[2] or LOOPBACK, port=int(match[3]))
