"""TLS for connections that carry the state of a run, with the certificate that the node has for etcd.

The certificate only encrypts. Who is at the other end is proved by the run's secret: the handshake that follows is
bound to the certificate that both sides saw, so that somebody in between who shows another one is found out. Neither
names nor purposes in it matter therefore; a client's certificate for etcd, which is what nodes have, will do.
"""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

from elastic3d.trust.credentials import Credentials


def serve_encrypted(connection: socket.socket, credentials: Credentials) -> tuple[socket.socket, bytes]:
    """Return the connection, to be encrypted where this node has a certificate, and what binds a handshake to it.

    `agree` comes next. The files are read each time: they may be replaced while the job runs. OSError, ValueError.
    """
    if not credentials.certificate:
        return connection, b""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(credentials.certificate, credentials.key)
    first = Path(credentials.certificate).read_text().partition("-----END CERTIFICATE-----")
    binding = ssl.PEM_cert_to_DER_cert(first[0][first[0].index("-----BEGIN") :] + first[1])
    return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), binding


def agree(connection: socket.socket) -> None:
    """Agree on the encryption of a connection from `serve_encrypted`, within its timeout; OSError."""
    if isinstance(connection, ssl.SSLSocket):
        connection.do_handshake()


def dial_encrypted(connection: socket.socket, credentials: Credentials) -> tuple[socket.socket, bytes]:
    """Return the same of the side that dialled; OSError where the other side does not encrypt."""
    if not credentials.certificate:
        return connection, b""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    wrapped = context.wrap_socket(connection)
    return wrapped, wrapped.getpeercert(binary_form=True) or b""
