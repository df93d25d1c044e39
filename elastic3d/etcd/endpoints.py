"""Addresses of etcd members, as people write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from elastic3d.errors import ConfigurationError

DEFAULT_PORT = 2379


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One member's client address."""

    host: str
    port: int
    tls: bool

    @property
    def target(self) -> str:
        """The address as gRPC takes it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.target}"


def parse_endpoints(endpoints: str | Sequence[str], *, tls: bool = False) -> tuple[Endpoint, ...]:
    """Return the endpoints of `h1:2379,h2:2379`, `http(s)://h:2379`, `h` or `[::1]:2379`, or of a sequence of these.

    Without a scheme an endpoint is encrypted if `tls` is set. ConfigurationError for what cannot be an address.
    """
    texts = [endpoints] if isinstance(endpoints, str) else list(endpoints)
    parts = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigurationError("etcd: no endpoint given; write host:port, several separated by commas")
    return tuple(dict.fromkeys(_parse(part, tls=tls) for part in parts))


def _parse(text: str, *, tls: bool) -> Endpoint:
    scheme, separator, rest = text.rpartition("://")
    if not separator:
        scheme = "https" if tls else "http"
    hint = f"etcd: {text!r} is not an endpoint; write host:port, http://host:port or https://host:port"
    if scheme not in ("http", "https"):
        raise ConfigurationError(hint)
    if scheme == "http" and tls:
        raise ConfigurationError(f"etcd: TLS files are given, but {text!r} asks for a plain connection; write https://")
    try:
        parts = urlsplit(f"//{rest}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigurationError(hint) from error
    if not host or parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None:
        raise ConfigurationError(hint)
    if host.count(":") and not rest.startswith("["):
        raise ConfigurationError(hint)
    return Endpoint(host=host, port=DEFAULT_PORT if port is None else port, tls=scheme == "https")
