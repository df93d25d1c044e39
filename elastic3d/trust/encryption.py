"""TLS for connections between the nodes of a run, with the certificate that the node has for etcd.

The certificate only encrypts. The run's secret proves the other end's identity: the handshake that follows is bound to
the certificate that both sides saw, so that somebody in between who shows another one is detected. Therefore neither
names nor purposes in it matter; a client certificate for etcd, which nodes have, will do.
"""

from __future__ import annotations

import functools
import os
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from elastic3d.trust.channel import WireError
from elastic3d.trust.credentials import Credentials
from elastic3d.trust.handshake import EVERY_NODE, LIMIT, HandshakeRejected, plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Encryption:
    """How a node encrypts. server, client: for connections it answers and dials. binding: of those it answers."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    binding: bytes


def load(certificate: str, key: str) -> Encryption | None:
    """Return how to encrypt with these PEM files, None if there are none ("").

    The files are read again only if they changed: they may be replaced while the job runs. OSError, ValueError.
    """
    if not certificate:
        return None
    return _load(certificate, key, _state(certificate), _state(key))


def _state(path: str) -> tuple[int, int, int]:
    stat = os.stat(path)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


@functools.lru_cache(maxsize=4)
def _load(certificate: str, key: str, *state: tuple[int, int, int]) -> Encryption:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # An empty passphrase, or OpenSSL would ask for one at the terminal.
    server.load_cert_chain(certificate, key, password="")
    # A peer could use these to make this side work again and again over one connection.
    server.options |= ssl.OP_NO_RENEGOTIATION
    server.num_tickets = 0
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_2
    first = Path(certificate).read_text().partition("-----END CERTIFICATE-----")
    binding = ssl.PEM_cert_to_DER_cert(first[0][first[0].index("-----BEGIN") :] + first[1])
    return Encryption(server=server, client=client, binding=binding)


def serve_encrypted(connection: socket.socket, credentials: Credentials) -> tuple[socket.socket, bytes]:
    """Return the connection, to be encrypted if this node has a certificate, and what binds a handshake to it.

    `agree` comes next. Waits for the first bytes, within the connection's timeout. HandshakeRejected for a caller that
    does not encrypt, WireError for one that sent nothing; OSError, ValueError.
    """
    encryption = load(credentials.certificate, credentials.key)
    if encryption is None:
        return connection, b""
    first = connection.recv(LIMIT, socket.MSG_PEEK)
    if not first:
        raise WireError("gone before it said anything")
    refusal = plain(first)
    if refusal is not None:
        raise refusal
    return encryption.server.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), (
        encryption.binding
    )


def agree(connection: socket.socket) -> None:
    """Agree on the encryption of a connection from `serve_encrypted`, within its timeout; OSError."""
    if isinstance(connection, ssl.SSLSocket):
        connection.do_handshake()


def dial_encrypted(connection: socket.socket, credentials: Credentials) -> tuple[socket.socket, bytes]:
    """Return the same for the side that dialled; HandshakeRejected if the other side does not encrypt, OSError."""
    encryption = load(credentials.certificate, credentials.key)
    if encryption is None:
        return connection, b""
    try:
        wrapped = encryption.client.wrap_socket(connection)
    except ssl.SSLEOFError:
        # It went away; that does not show what it is.
        raise
    except ssl.SSLError as error:
        raise not_agreed(error) from error
    return wrapped, wrapped.getpeercert(binary_form=True) or b""


def not_agreed(error: ssl.SSLError) -> HandshakeRejected:
    """Return why the side we dialled did not agree with us on encryption."""
    if error.reason and "ALERT_HANDSHAKE_FAILURE" in error.reason:
        return HandshakeRejected(f"does not encrypt its connections, and this node does: {EVERY_NODE}")
    return HandshakeRejected(f"did not agree with this node on encryption: {error.reason or error}")
