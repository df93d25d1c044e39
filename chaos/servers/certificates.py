"""PEM files for an encrypted etcd on this machine, which can expire and be replaced."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from elastic3d.errors import ConfigurationError
from elastic3d.etcd import Tls

COMMON_NAMES = {"server": "localhost", "client": "root"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """PEM files of an authority, of a server on this machine, and of a client whose common name is root."""

    directory: Path

    @classmethod
    def make(cls, directory: Path, *, also: str = "") -> Certificates:
        """Make them in `directory` with the openssl program; good for a day, for 127.0.0.1, localhost and `also`.

        ConfigurationError where that program is missing.
        """
        if shutil.which("openssl") is None:
            raise ConfigurationError("etcd: the openssl program is needed to make certificates, and is not on PATH")
        made = cls(directory=directory)
        names = ",".join(["IP:127.0.0.1", "DNS:localhost", *([f"IP:{also}"] if also else [])])
        (directory / "extensions").write_text(f"subjectAltName={names}\nextendedKeyUsage=serverAuth,clientAuth\n")
        made._openssl(
            *("req", "-x509", *_NEW_KEY, "-keyout", "ca.key", "-out", "ca.pem", "-days", "1", "-subj", "/CN=test ca")
        )
        for name in COMMON_NAMES:
            made.renew(name)
        return made

    @property
    def ca(self) -> Path:
        """The authority's certificate."""
        return self.directory / "ca.pem"

    @property
    def server(self) -> Path:
        """The servers' certificate."""
        return self.directory / "server.pem"

    @property
    def server_key(self) -> Path:
        """The servers' key."""
        return self.directory / "server.key"

    @property
    def client(self) -> Path:
        """The client's certificate."""
        return self.directory / "client.pem"

    @property
    def client_key(self) -> Path:
        """The client's key."""
        return self.directory / "client.key"

    def tls(self, *, client: bool = True) -> Tls:
        """Return what an EtcdClient takes; `client` adds the client's own certificate."""
        if not client:
            return Tls(ca=self.ca)
        return Tls(ca=self.ca, certificate=self.client, key=self.client_key)

    def renew(self, name: str, *, days: int = 1) -> None:
        """Replace key and certificate of `server` or `client`; what is good for -1 days expired yesterday."""
        new = [f"{name}.new.{kind}" for kind in ("key", "csr", "pem")]
        key, request, certificate = new
        self._openssl("req", *_NEW_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={COMMON_NAMES[name]}")
        self._openssl(
            *("x509", "-req", "-in", request, "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-days", str(days), "-extfile", "extensions", "-out", certificate),
        )
        for file in new:
            (self.directory / file).rename(self.directory / file.replace(".new", ""))

    def expire(self, name: str) -> None:
        """Let the certificate of `server` or `client` be one that is over."""
        self.renew(name, days=-1)

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.directory, check=True, capture_output=True, timeout=60)


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
