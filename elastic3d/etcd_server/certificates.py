"""PEM files for an encrypted etcd: of its own authority, the servers and a client. They can expire and be replaced.

The openssl program makes them. It is on nearly every machine, and the guide shows the same commands; the cryptography
package, which could make them as well, is compiled code that nobody needs for anything else here unless checkpoints are
encrypted.
"""

from __future__ import annotations

import ipaddress
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic3d.errors import ConfigurationError
from elastic3d.etcd import Tls

COMMON_NAMES = {"server": "localhost", "client": "root"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """PEM files of an authority, of the servers, and of a client whose common name is root, which etcd lets do all."""

    directory: Path

    @classmethod
    def make(
        cls, directory: Path, *, also: Sequence[str] = (), days: int = 1, authority: str = "test ca"
    ) -> Certificates:
        """Make them in `directory`, for 127.0.0.1, localhost and the hosts in `also`; the authority is good for `days`.

        The others are good for a tenth of that, and a day at least. ConfigurationError where openssl is missing.
        """
        if not can_be_made():
            raise ConfigurationError("etcd: the openssl program is needed to make certificates, and is not on PATH")
        made = cls(directory=directory)
        names = ",".join(map(_alternative_name, ("127.0.0.1", "localhost", *also)))
        (directory / "extensions").write_text(f"subjectAltName={names}\nextendedKeyUsage=serverAuth,clientAuth\n")
        made._openssl(
            *("req", "-x509", *_NEW_KEY, "-keyout", "ca.key", "-out", "ca.pem"),
            *("-days", str(days), "-subj", f"/CN={authority}"),
        )
        for name in COMMON_NAMES:
            made.renew(name, days=max(days // 10, 1))
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

    def ends_within(self, name: str, days: int) -> bool:
        """Return whether the certificate of `server` or `client` is over in so many days, or cannot be read."""
        arguments = ("openssl", "x509", "-in", f"{name}.pem", "-noout", "-checkend", str(days * 86400))
        done = subprocess.run(arguments, cwd=self.directory, check=False, capture_output=True, timeout=60)
        return done.returncode != 0

    def expire(self, name: str) -> None:
        """Let the certificate of `server` or `client` be one that is over."""
        self.renew(name, days=-1)

    def _openssl(self, *arguments: str) -> None:
        try:
            subprocess.run(["openssl", *arguments], cwd=self.directory, check=True, capture_output=True, timeout=60)
        except subprocess.CalledProcessError as error:
            said = error.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise ConfigurationError(f"etcd: openssl made no certificates in {self.directory}: {said}") from error


def can_be_made() -> bool:
    """Return whether the openssl program is on PATH, without which certificates are neither made nor looked at."""
    return shutil.which("openssl") is not None


def _alternative_name(host: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        return f"DNS:{host}"


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
