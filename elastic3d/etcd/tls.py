"""The files of an encrypted connection: read anew for each one, so that certificates can be replaced during a job."""

from __future__ import annotations

import base64
import re
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from elastic3d.errors import ConfigurationError

_PEM = re.compile(rb"-----BEGIN [^-]+-----(.+?)-----END [^-]+-----", re.DOTALL)
_TIMES = {0x17: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pem:
    """The contents of the files when they were read."""

    ca: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Files for an encrypted connection, all PEM.

    ca: the authority that signed the servers' certificates; None trusts the system's. certificate, key: the client's
    own, if the servers ask for one (`--client-cert-auth`). etcd takes the user from the certificate's common name when
    no token is sent: with `CN=root` neither user nor password is needed. server_name: the name to expect in the
    servers' certificates, if it is not the endpoint's host.

    ConfigurationError for files that are missing, are not PEM, or do not belong together.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str | None = None

    @classmethod
    def of(cls, ca: str, certificate: str, key: str) -> Tls | None:
        """Return the files of three paths, "" for none; None if all are "": then nothing is encrypted."""
        files = [Path(name) if name else None for name in (ca, certificate, key)]
        return cls(ca=files[0], certificate=files[1], key=files[2]) if any(files) else None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigurationError("etcd: a client certificate and its key go together; give both or neither")
        for path in (self.ca, self.certificate, self.key):
            if path is not None and not path.is_file():
                raise ConfigurationError(f"etcd: there is no file {path}; TLS files are paths of PEM files")
        self.read()

    def read(self) -> Pem:
        """Return what the files hold now; ConfigurationError for contents that gRPC would not take.

        gRPC would kill the process over an empty file, which a file is for a moment while it is replaced.
        """
        pem = Pem(ca=_read(self.ca), certificate=_read(self.certificate), key=_read(self.key))
        if self.certificate is not None and self.key is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(self.certificate, self.key, password="")
            except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
                raise ConfigurationError(
                    f"etcd: the client certificate {self.certificate} and the key {self.key} cannot be used together "
                    f"({error}); give a PEM certificate and its own key, without a passphrase"
                ) from error
        return pem

    def expired(self, now: float) -> str:
        """Return which of the files has expired at wall time `now` and what to do about it, "" for none."""
        for path in (self.certificate, self.ca):
            end = None if path is None else _end(path)
            if end is not None and end <= now:
                day = datetime.fromtimestamp(end, UTC).isoformat(" ", "seconds")
                return f"{path} expired on {day}: replace the file, it is read again for each connection"
        return ""


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"etcd: a TLS file cannot be read: {error}") from error
    if not _PEM.search(content):
        raise ConfigurationError(f"etcd: {path} is not a PEM file; TLS files are paths of PEM files")
    return content


def _end(path: Path) -> float | None:
    """Return the wall time at which the first certificate of a PEM file expires; None if there is no certificate.

    X.509 (RFC 5280): a certificate is a sequence whose first part is a sequence of, among others, an optional version,
    a serial number, an algorithm, the issuer, and the validity: a sequence of two times.
    """
    try:
        match = _PEM.search(path.read_bytes())
        if match is None:
            return None
        parts = _parts(_parts(_parts(base64.b64decode(match[1]))[0][1])[0][1])
        kind, value = _parts(parts[4 if parts[0][0] == 0xA0 else 3][1])[1]
        return datetime.strptime(value.decode(), _TIMES[kind]).replace(tzinfo=UTC).timestamp()
    except (OSError, ValueError, LookupError):
        return None


def _parts(der: bytes) -> list[tuple[int, bytes]]:
    """Return tag and content of each of the consecutive values in `der`."""
    parts = []
    while der:
        tag, length, start = der[0], der[1], 2
        if length & 0x80:
            start += length & 0x7F
            length = int.from_bytes(der[2:start])
        parts.append((tag, der[start : start + length]))
        der = der[start + length :]
    return parts
