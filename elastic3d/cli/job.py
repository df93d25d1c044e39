"""The options by which a person names a live job, shared by all commands about one."""

from __future__ import annotations

import functools
import getpass
import inspect
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from elastic3d import environment
from elastic3d.errors import ConfigurationError, Elastic3dError, UsageError
from elastic3d.etcd import EtcdClient, Tls, parse_endpoints, password_warning
from elastic3d.membership.inspection.jobs import Job, job

PANEL = "Which job"
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")

_Endpoint = Annotated[
    str,
    typer.Option(
        "--endpoint",
        metavar="HOST:PORT,...",
        envvar=environment.ENDPOINT.name,
        help="etcd, as given to --rdzv-endpoint.",
        rich_help_panel=PANEL,
    ),
]
_Id = Annotated[
    str,
    typer.Option(
        "--id",
        metavar="RUN_ID",
        envvar=environment.RUN_ID.name,
        help="The job, as given to --rdzv-id. Default: the only one there is.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]
_Prefix = Annotated[str, typer.Option("--prefix", help="As given to --rdzv-conf=prefix=.", rich_help_panel=PANEL)]
_User = Annotated[str, typer.Option("--user", help="etcd user.", rich_help_panel=PANEL, show_default=False)]
_PasswordFile = Annotated[
    str,
    typer.Option(
        "--password-file", metavar="FILE", help="Holds the user's password.", rich_help_panel=PANEL, show_default=False
    ),
]
_Ca = Annotated[
    str,
    typer.Option(
        "--ca", metavar="FILE", help="The CA of etcd's certificates.", rich_help_panel=PANEL, show_default=False
    ),
]
_Cert = Annotated[
    str,
    typer.Option("--cert", metavar="FILE", help="A client certificate.", rich_help_panel=PANEL, show_default=False),
]
_Key = Annotated[
    str, typer.Option("--key", metavar="FILE", help="Its private key.", rich_help_panel=PANEL, show_default=False)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Where etcd is, how to log in, and which job. UsageError for what is wrong without asking etcd."""

    endpoint: str = "127.0.0.1:2379"
    id: str = ""
    prefix: str = "elastic3d"
    user: str = ""
    password_file: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        if self.id and not _NAME.fullmatch(self.id):
            raise UsageError(f"--id {self.id!r}: a run id is 1 to 128 letters, digits and . _ : -")
        if not re.fullmatch(rf"(/{_NAME.pattern})+", self.path):
            raise UsageError(f"--prefix {self.prefix!r}: use letters, digits and . _ : - /")
        for one, other in (("user", "password_file"), ("cert", "key")):
            if bool(getattr(self, one)) != bool(getattr(self, other)):
                names = f"--{one} and --{other}".replace("_", "-")
                raise UsageError(f"{names} belong together; give both or neither")
        encrypted = self.tls() is not None
        try:
            parse_endpoints(self.endpoint, tls=encrypted)
        except ConfigurationError as error:
            raise UsageError(f"--endpoint {self.endpoint!r}: {error}") from error

    @property
    def path(self) -> str:
        """The prefix as etcd has it."""
        return "/" + self.prefix.strip("/")

    def tls(self) -> Tls | None:
        """Return the files of an encrypted connection; ConfigurationError if one is missing."""
        return Tls.of(self.ca, self.cert, self.key)

    def password(self) -> str | None:
        """Return the password; UsageError if its file cannot be read."""
        if not self.password_file:
            return None
        try:
            return Path(self.password_file).read_text().strip()
        except (OSError, UnicodeError) as error:
            raise UsageError(f"--password-file {self.password_file!r} cannot be read: {error}") from error

    @contextmanager
    def client(self) -> Iterator[EtcdClient]:
        """Yield a client, which has not asked etcd anything yet; a password that goes unencrypted is warned of."""
        password = self.password()
        if password is not None:
            endpoints = parse_endpoints(self.endpoint, tls=self.tls() is not None)
            warning = password_warning(self.user, endpoints)
            if warning:
                print(f"elastic3d: {warning}", file=sys.stderr)
        with EtcdClient(self.endpoint, user=self.user or None, password=password, tls=self.tls()) as client:
            yield client

    @contextmanager
    def connect(self) -> Iterator[tuple[EtcdClient, Job]]:
        """Yield a client that was tested to have read access, and the job; errors say what to do."""
        with self.client() as client:
            client.check(f"{self.path}/{self.id}/" if self.id else f"{self.path}/")
            yield client, job(client, self.path, self.id)


_DEFAULTS = JobOptions()
_OPTIONS: dict[str, Any] = {
    "endpoint": _Endpoint,
    "id": _Id,
    "prefix": _Prefix,
    "user": _User,
    "password_file": _PasswordFile,
    "ca": _Ca,
    "cert": _Cert,
    "key": _Key,
}


def asker() -> str:
    """Return who gives an order, for people: the user, and the machine they are logged in to."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def about_a_job(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command(options, ...)` as typer takes it: with options that name the job in place of its first parameter.

    An error of elastic3d's is printed in one line, with its own exit code.
    """
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(_DEFAULTS, name), annotation=kind)
        for name, kind in _OPTIONS.items()
    ]
    parameters = [own_parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for own_parameter in own] + shared

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        try:
            options = JobOptions(**{name: values.pop(name) for name in _OPTIONS})
            command(options, **values)
        except Elastic3dError as error:
            print(f"elastic3d: {' '.join(str(error).split())}", file=sys.stderr)
            raise typer.Exit(error.exit_code) from None

    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapped
