"""Find out why nothing answers etcd's gRPC at an endpoint, by sending it a plain HTTP request.

gRPC says UNAVAILABLE for a closed port, a web server, an etcd that wants TLS and an etcd 2 alike. `GET /version` tells
them apart, since every etcd from 2.1 on answers it with JSON; an endpoint that does not answer is offered a TLS
handshake.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
from collections.abc import Iterable

from elastic3d.clock import SYSTEM
from elastic3d.errors import EtcdError, EtcdRefused
from elastic3d.etcd.endpoints import Endpoint
from elastic3d.etcd.tls import Tls

# gRPC's words for it. A missing client certificate shows only after the handshake: TLS 1.3 asks for it late.
HANDSHAKE = ("handshake failed", "CERTIFICATE", "TSI_")


def explain(endpoints: Iterable[Endpoint], timeout: float, error: EtcdError) -> None:
    """Raise EtcdRefused, caused by `error`, if it can be found out what is wrong at some endpoint; else return."""
    for endpoint in endpoints:
        reason = _reason(endpoint, timeout)
        if reason is not None:
            raise EtcdRefused(f"etcd: {endpoint} {reason}") from error
    if any(text in str(error) for text in HANDSHAKE):
        raise EtcdRefused(
            f"etcd: the TLS handshake fails ({error}); see that `ca` signed the servers' certificates, that these name "
            "the endpoint's host, and that a client certificate is given where the servers ask for one"
        ) from error


def handshake(endpoint: Endpoint, tls: Tls | None, timeout: float) -> str:
    """Return why a TLS handshake with `endpoint` fails, "" if that cannot be found out."""
    try:
        context = ssl.create_default_context(cafile=tls.ca if tls is not None else None)
        name = (tls.server_name if tls is not None else None) or endpoint.host
        with socket.create_connection((endpoint.host, endpoint.port), timeout) as connection:
            with context.wrap_socket(connection, server_hostname=name):
                return ""
    except ssl.SSLCertVerificationError as error:
        return f"the certificate of {endpoint} is not accepted: {error.verify_message}"
    except OSError:
        return ""


def require_version(version: str, oldest: tuple[int, int]) -> None:
    """Raise EtcdRefused if `version`, such as "3.5.1", is older than `oldest`."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < oldest:
        wanted = ".".join(map(str, oldest))
        raise EtcdRefused(f"etcd: the server is version {version or 'unknown'}; {wanted} or later is needed")


def _reason(endpoint: Endpoint, timeout: float) -> str | None:
    answer = _ask(endpoint, timeout)
    if not answer.startswith(b"HTTP/"):
        if not endpoint.tls and _speaks_tls(endpoint, timeout):
            return "speaks TLS; write https:// and give `tls` with its authority"
        return None
    head, _, body = answer.partition(b"\r\n\r\n")
    try:
        version = str(json.loads(body)["etcdserver"])
    except (ValueError, KeyError, TypeError):
        first = head.split(b"\r\n", 1)[0].decode("latin-1")
        return f"is a web server, not etcd (it said {first!r}); give etcd's client address"
    require_version(version, (3, 4))
    return "does not speak TLS; write http://" if endpoint.tls else None


def _speaks_tls(endpoint: Endpoint, timeout: float) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((endpoint.host, endpoint.port), timeout) as connection:
            with context.wrap_socket(connection):
                return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # it speaks TLS, and wants a client certificate
    except OSError:
        return False


def _ask(endpoint: Endpoint, timeout: float) -> bytes:
    answer = b""
    try:
        with socket.create_connection((endpoint.host, endpoint.port), timeout) as connection:
            connection.settimeout(timeout)
            connection.sendall(f"GET /version HTTP/1.0\r\nHost: {endpoint.target}\r\n\r\n".encode())
            # For the whole answer: what sends a byte now and then would be heard for hours otherwise.
            ends = SYSTEM.monotonic() + timeout
            while len(answer) < 1 << 16 and (part := connection.recv(1 << 14)):
                answer += part
                connection.settimeout(max(0.001, ends - SYSTEM.monotonic()))
    except OSError:
        pass  # whatever came before it is the answer
    return answer
