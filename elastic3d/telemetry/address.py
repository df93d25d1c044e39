"""Where telemetry is sent: `telemetry=` of `elastic3d.run`, checked where it enters."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from urllib.parse import urlsplit

from checkpointing.stores.address import redacted
from elastic3d import environment
from elastic3d.errors import ConfigurationError, UsageError

OTLP = "otlp"
"""The word for a collector that the environment names, or one on this machine."""

PROTOCOL = "http/protobuf"
LONGEST = 86_400_000
"""Milliseconds: a day, the longest interval of metrics."""

_NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorAddress:
    """url: what the paths of the signals are added to, "" for what the environment says.

    interval: seconds from one export of metrics to the next.
    """

    url: str
    interval: float = 60.0

    def of(self, signal: str) -> str | None:
        """Return the address for "traces" or "metrics", None to leave it to the environment."""
        return f"{self.url.rstrip('/')}/v1/{signal}" if self.url else None

    def __str__(self) -> str:
        return redacted(self.url) or OTLP


def collector_address(value: object) -> CollectorAddress | None:
    """Return where telemetry is to be sent, None for nowhere.

    UsageError for what is no address; ConfigurationError where the environment asks for what there is not.
    """
    if value is None:
        return None
    if value != OTLP and not (isinstance(value, str) and _is_address(value)):
        shown = redacted(value) if isinstance(value, str) else value
        raise UsageError(
            f"elastic3d.run(telemetry={shown!r}): give 'otlp' for the collector that OTEL_EXPORTER_OTLP_ENDPOINT "
            "names, or the one at http://localhost:4318; an address such as 'http://collector:4318', to which "
            "/v1/traces and /v1/metrics are added; or None"
        )
    protocol = environment.OTLP_PROTOCOL.read() or PROTOCOL
    if protocol != PROTOCOL:
        raise ConfigurationError(
            f"elastic3d.run(telemetry=...): {environment.OTLP_PROTOCOL.name}={protocol} is not spoken here: set it to "
            f"{PROTOCOL}, and the endpoint to the collector's port for that, mostly 4318"
        )
    return CollectorAddress(url="" if value == OTLP else str(value), interval=_interval())


def require_sdk() -> None:
    """Raise ConfigurationError where OpenTelemetry's SDK or its exporter is not installed. Imports neither."""
    for name in _NEEDED:
        if not _is_there(name):
            raise ConfigurationError(
                "elastic3d.run(telemetry=...) needs the packages opentelemetry-sdk and "
                f"opentelemetry-exporter-otlp-proto-http, and there is no {name}: pip install 'elastic3d[otel]', or "
                "leave telemetry= out"
            )


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    plain = text.isascii() and text.isprintable() and " " not in text
    return plain and parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and not parts.fragment


def _interval() -> float:
    variable = environment.OTEL_INTERVAL
    text = variable.read() or variable.default
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:12]) <= LONGEST and len(text) <= 12):
        raise ConfigurationError(
            f"{variable.name}={text!r}: give the milliseconds from one export of metrics to the next, from 1 to "
            f"{LONGEST}"
        )
    return int(text) / 1000
