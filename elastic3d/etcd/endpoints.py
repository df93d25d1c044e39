"""Addresses of etcd members, as people write them."""

from __future__ import annotations

import ipaddress
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


def readable_on_the_way(endpoints: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
    """Return the endpoints on other hosts that are not encrypted: a password sent there can be read by others."""
    return tuple(endpoint for endpoint in endpoints if not endpoint.tls and not _here(endpoint.host))


def password_warning(user: str, endpoints: Sequence[Endpoint]) -> str:
    """Return the line for people about a password that is sent unencrypted to another host, "" if none is."""
    readable = ", ".join(map(str, readable_on_the_way(endpoints)))
    if not readable:
        return ""
    return (
        f"the password of etcd's user {user} goes unencrypted to {readable}, where everybody on the way can "
        "read it; let etcd serve TLS and give its authority (ca), or write https:// before the endpoints"
    )


def _here(host: str) -> bool:
    """Return whether what is sent to `host` stays on this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


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
