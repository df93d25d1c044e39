"""Who may see the page: a token, and no other site's doing. Pure.

A page that shows a job and may give orders is reached by every other page that the same browser has open. So

- the Host header has to be an address, "localhost", or a name that was allowed: a foreign name that was made to point
  here (DNS rebinding) is refused;
- each request carries the token, in a cookie that other sites' requests do not carry (SameSite=Strict), or as
  `Authorization: Bearer`;
- an order has to come from the page itself: its Origin is its Host.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from elastic3d.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


def new_token() -> str:
    """Return a token that nobody guesses: 192 random bits."""
    return secrets.token_urlsafe(24)


def parse_listen(text: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT"; an IPv6 address is in brackets. UsageError for anything else."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not (colon and host and port.isascii() and port.isdigit() and int(port) <= 65535):
        raise UsageError(
            f"--listen {text!r}: give HOST:PORT, such as 127.0.0.1:8080, [::1]:8080, or port 0 for any that is free"
        )
    if _address(host) is None and not _NAME.fullmatch(host):
        raise UsageError(f"--listen {text!r}: {host!r} is no address and no host's name")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches that address."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAccess:
    """token: "" for none. names: host names, in lower case, by which browsers may reach the page."""

    token: str = field(repr=False)
    names: Collection[str] = ()

    def host_allowed(self, header: str) -> bool:
        """Return whether a request with this Host header may be served."""
        host = _host(header)
        if host is None:
            return False
        return host == "localhost" or _address(host) is not None or host in self.names

    def token_right(self, given: str) -> bool:
        """Return whether this is the token; in constant time."""
        return bool(self.token) and hmac.compare_digest(given.encode(errors="replace"), self.token.encode())

    def may_see(self, *, cookie: str, authorization: str) -> bool:
        """Return whether a request carries the token."""
        if not self.token:
            return True
        scheme, _, bearer = authorization.partition(" ")
        return self.token_right(cookie) or (scheme.lower() == "bearer" and self.token_right(bearer.strip()))


def same_origin(origin: str, host: str) -> bool:
    """Return whether an Origin header names the site of the Host header; its scheme may be that of a proxy."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(host) and parts.netloc.lower() == host.lower()


def checked_name(name: str) -> str:
    """Return a host name in lower case; UsageError for anything else."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"--allow-host {name!r}: give a host's name without a port, such as jobs.example.org")
    return name.lower()


def _host(header: str) -> str | None:
    """Return the host of a Host header, without its port, None where it is none."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]+))(?::[0-9]{1,5})?", header)
    return (match[1] or match[2]).lower() if match is not None else None


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
